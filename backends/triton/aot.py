"""Ahead-of-time compilation: every kernel the entry points launch, for GPUs this machine need not have.

The entry points run once on tensors without memory (device "meta"), and what they would launch is compiled for each
architecture. Registers and spills are those ``ptxas -v`` reports for the very code Triton hands it; shared memory is
what Triton will ask for at launch. Reports are kept in the user's cache under a name that depends on the code.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from backends.fetch import cache_dir
from backends.triton.launch import Launch
from entropic_ctl.errors import EntropicError

__all__ = ["ARCHITECTURES", "KernelReport", "compile_all", "kernels_of_package", "main", "table"]

ARCHITECTURES = (80, 90)
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.float64: "fp64",
}


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What the compiler says about one specialisation on one architecture.

    ``case`` names the launch; ``registers`` per thread; ``spill_bytes`` stores and loads together; ``shared_bytes`` per
    block; ``constants`` the compile-time values.
    """

    kernel: str
    case: str
    architecture: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    constants: str


@dataclass(frozen=True, slots=True)
class _Job:
    module: str
    kernel: str
    case: str
    architecture: int
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    num_warps: int
    num_stages: int


def _job(launch: Launch, case: str, architecture: int) -> _Job:
    """Specialise as the launcher does: ones and constants are compiled in, multiples of 16 are declared."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[int] = []
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        value = launch.arguments[name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(place)
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(place)
        else:
            signature[name] = "fp32"
    return _Job(
        kernel.fn.__module__,
        kernel.fn.__name__,
        case,
        architecture,
        signature,
        constants,
        tuple(aligned),
        launch.num_warps,
        launch.num_stages,
    )


def _assembler(architecture: int) -> str:
    """Return the assembler that Triton itself uses for an architecture (it bundles more than one)."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(architecture).path)


_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def _ptxas_report(ptx: str, architecture: int) -> tuple[int, int, int]:
    """Return (registers, spill bytes, stack bytes) from ``ptxas -v``; of several functions the worst."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        name = f"sm_{architecture}{'a' if architecture >= 90 else ''}"
        done = subprocess.run(
            [
                _assembler(architecture),
                "-v",
                f"--gpu-name={name}",
                str(source),
                "-o",
                str(Path(folder, "kernel.cubin")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    said = done.stdout + done.stderr
    used, spills = _USED.findall(said), _SPILLS.findall(said)
    if done.returncode or not used or not spills:
        raise EntropicError(f"ptxas gave no report for {name}: {said.strip()[:300] or done.returncode}")
    return (
        max(int(n) for n in used),
        max(int(store) + int(load) for _, store, load in spills),
        max(int(stack) for stack, _, _ in spills),
    )


def _compile(job: _Job) -> KernelReport:
    """Compile one specialisation (Triton keeps its own cache) and read the report."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(job.module), job.kernel)
    attributes = {(place,): [["tt.divisibility", 16]] for place in job.aligned}
    constants = {(list(job.signature).index(name),): value for name, value in job.constants.items()}
    source = ASTSource(kernel, job.signature, constants, attributes)
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", job.architecture, 32),
        options={"num_warps": job.num_warps, "num_stages": job.num_stages},
    )
    ptx = binary.asm["ptx"]
    digest = hashlib.sha256(f"{_assembler(job.architecture)} {job.architecture} {ptx}".encode()).hexdigest()[:32]
    kept = cache_dir() / "triton-reports" / f"{digest}.json"
    if kept.exists():
        registers, spills, stack = json.loads(kept.read_text(encoding="utf-8"))
    else:
        registers, spills, stack = _ptxas_report(ptx, job.architecture)
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps([registers, spills, stack]), encoding="utf-8")
        part.replace(kept)
    shown = " ".join(
        f"{name}={value}" for name, value in job.constants.items() if name.isupper() and value not in (None, 0, False)
    )
    return KernelReport(
        job.kernel.lstrip("_"),
        job.case,
        job.architecture,
        registers,
        spills,
        stack,
        int(binary.metadata.shared),
        job.num_warps,
        shown,
    )


def kernels_of_package() -> dict[str, Any]:
    """Return every kernel of ``backends.triton`` that is started from the host, by ``module.name``.

    A function that other kernels call is compiled with them; its name has no leading underscore.
    """
    import triton

    package = importlib.import_module("backends.triton")
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__, prefix="backends.triton."):
        module = importlib.import_module(info.name)
        for name, thing in vars(module).items():
            if isinstance(thing, triton.JITFunction) and thing.fn.__module__ == info.name and name.startswith("_"):
                found[f"{info.name.rpartition('.')[2]}.{name}"] = thing
    return found


def compile_all(
    *,
    architectures: Sequence[int] = ARCHITECTURES,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[KernelReport]:
    """Compile every case of :mod:`backends.triton.cases` for every architecture.

    Parameters
    ----------
    architectures : sequence of int
        Compute capabilities, 80 for sm_80.
    workers : int, optional
        Processes; default: the processors.
    progress : callable(done, total), optional

    Raises
    ------
    EntropicError
        If the interpreter is on (it replaces the compiler), or the compiler refuses a kernel.
    """
    from backends.triton import interpreted
    from backends.triton.cases import launches

    if interpreted():
        raise EntropicError("TRITON_INTERPRET is set: unset it to compile")
    distinct: dict[str, _Job] = {}  # cases share specialisations: the first one names it
    for case, launch in launches():
        for architecture in architectures:
            job = _job(launch, case, architecture)
            distinct.setdefault(repr(replace(job, case="")), job)
    jobs = list(distinct.values())
    reports: list[KernelReport] = []
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for report in pool.map(_compile, jobs):
            reports.append(report)
            if progress is not None:
                progress(len(reports), len(jobs))
    return reports


def table(reports: Sequence[KernelReport]) -> str:
    """Return the reports as text, by kernel, case and architecture."""
    columns = ("kernel", "case", "architecture", "registers", "spill_bytes", "stack_bytes", "shared_bytes", "warps")
    ordered = sorted(reports, key=lambda r: (r.kernel, r.case, r.architecture))
    lines = [columns, *(tuple(str(getattr(report, name)) for name in columns) for report in ordered)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile everything, print the table, write ``out/kernels.json``; 1 if anything spills."""
    import triton

    parser = argparse.ArgumentParser(prog="kernels-report", description="Compile every Triton kernel for GPUs.")
    parser.add_argument("--table", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    reports = compile_all(progress=lambda done, total: print(f"\r{done}/{total}", end="", file=sys.stderr, flush=True))
    print(file=sys.stderr)
    print(table(reports))
    if options.table is not None:
        head = f"# written by `make kernels-report`; triton {triton.__version__}; how to read it: backends/README.md"
        options.table.write_text(f"{head}\n{table(reports)}\n", encoding="utf-8")
    out = Path("out/kernels.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n", encoding="utf-8")
    spilling = sorted({report.kernel for report in reports if report.spill_bytes})
    print(f"{len(reports)} compiled; " + (f"SPILLS in {', '.join(spilling)}" if spilling else "no spills"))
    return 1 if spilling else 0


if __name__ == "__main__":
    from backends.triton.aot import main as run  # this module under its own name: workers find its classes by it

    sys.exit(run())
