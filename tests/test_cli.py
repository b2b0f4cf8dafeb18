"""The command line as a user meets it: what works prints and exits 0, what does not is one line and exit 2."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import entropic
from synthetic_bank import VOCAB
from typer.core import TyperGroup

from entropic_ctl import cli_live, cli_output, cli_run
from entropic_ctl.errors import BadInputError

ROOT = Path(__file__).resolve().parents[1]
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:17:03.0010000,100,5\n"
FEEDBACK = "law = 'feedback'\ntemperature = 0.8\ntarget_nats = 1.0\nt_min = 0.5\nt_max = 1.5\n"


@pytest.fixture
def config(tmp_path: Path, bank_file: Path) -> Any:
    """Write a small config; keyword arguments are the bodies of its tables."""

    def write(name: str = "run.toml", **tables: str) -> Path:
        bodies = {
            "workload": "n_requests = 5\nprompt_tokens = 20\noutput_tokens = 6\n",
            "engine": "pages = 64\n",
            "loop.temperature": "t_min = 0.5\nt_max = 1.5\n",
            "cost": f"bank = '{bank_file}'\n",
        }
        bodies |= {key.replace("_", ".", 1) if key.startswith("loop_") else key: body for key, body in tables.items()}
        if "bank" not in bodies["cost"]:
            bodies["cost"] += f"bank = '{bank_file}'\n"
        text = "".join(f"[{table}]\n{body}" for table, body in bodies.items())
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def certificate(config: Any, tmp_path: Path) -> Path:
    pytest.importorskip("flint")
    path = tmp_path / "cert.json"
    status, _, err = entropic(
        "prove", config(loop_temperature=FEEDBACK + "gain = 0.02\n"), "--out", path, "--vocab", VOCAB
    )
    assert status == 0, err
    return path


# -- what works -------------------------------------------------------------------------------------------------------


def test_help_lists_every_command_and_each_explains_itself_with_an_example() -> None:
    status, out, _ = entropic("--help")
    assert status == 0
    commands = (
        "demo",
        "fetch",
        "simulate",
        "generate",
        "record",
        "fit-entropy",
        "prove",
        "check",
        "margins",
        "phase",
        "replay",
        "repro",
        "eval",
        "workload",
    )
    for command in (*commands, "bench"):
        assert f" {command} " in out
    for command in (
        [(c,) for c in commands]
        + [("bench", b) for b in ("sim", "engine", "certificate", "theta")]
        + [("trace", "convert")]
    ):
        status, out, _ = entropic(*command, "--help")
        assert status == 0
        assert "Example:" in out
        assert "entropic " + " ".join(command) in " ".join(out.split())


def test_every_measuring_command_takes_json() -> None:
    for command in (
        "demo",
        "simulate",
        "generate",
        "record",
        "fit-entropy",
        "prove",
        "check",
        "margins",
        "phase",
        "replay",
        "repro",
        "eval",
        "bench sim",
    ):
        assert "--json" in entropic(*command.split(), "--help")[1]


def test_help_needs_no_optional_package() -> None:
    code = (
        "import sys\nfrom entropic_ctl import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "bad = {'torch', 'simpy', 'flint', 'matplotlib', 'pyarrow', 'sim', 'backends', 'proofs'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_simulate_accounts_for_every_request_and_writes_what_it_prints(config: Any, tmp_path: Path) -> None:
    status, out, err = entropic("simulate", config(), "--out", tmp_path / "res", "--json", tmp_path / "s.json")
    assert status == 0, err
    summary = json.loads((tmp_path / "s.json").read_text())["summary"]
    assert summary["requests_in"] == 5 == summary["requests_finished"]
    assert "throughput" in out
    from entropic_ctl import results

    table, stamp = results.read_table(tmp_path / "res" / "requests.parquet")
    assert len(table["id"]) == 5
    assert int(np.sum(table["output_tokens"])) == summary["output_tokens"]
    assert stamp["config"]["workload"]["n_requests"] == 5
    assert not list(tmp_path.glob(".res*"))


def test_seed_on_the_command_line_replaces_the_configs(config: Any, tmp_path: Path) -> None:
    spread = "kind = 'poisson'\nn_requests = 5\nprompt_tokens = 20\noutput_tokens = 6\n"
    found = []
    for i, seed in enumerate((1, 1, 2)):
        entropic("simulate", config(workload=spread), "--seed", seed, "--json", tmp_path / f"{i}.json")
        found.append(json.loads((tmp_path / f"{i}.json").read_text())["summary"])
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_trace_on_the_command_line(config: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(HEADER + ROW * 3)
    body = "n_requests = 2\noutput_length = 'limit'\n"
    status, _, err = entropic("simulate", config(workload=body), "--trace", trace, "--json", tmp_path / "s.json")
    assert status == 0, err
    summary = json.loads((tmp_path / "s.json").read_text())["summary"]
    assert summary["requests_in"] == 3  # the whole trace, whatever the workload said
    assert summary["output_tokens"] == 15


def test_proved_checked_simulated_and_refuted(config: Any, certificate: Path, tmp_path: Path) -> None:
    good = config(loop_temperature=FEEDBACK + "gain = 0.02\n")
    assert entropic("check", certificate)[0] == 0
    assert entropic("check", certificate, good)[0] == 0
    assert entropic("simulate", good, "--certificate", certificate)[0] == 0
    assert entropic("simulate", good)[0] == 0  # proved and checked on the spot
    bad = config("bad.toml", loop_temperature=FEEDBACK + "gain = 5.0\n")
    status, out, _ = entropic("prove", bad, "--out", tmp_path / "bad.json", "--vocab", VOCAB)
    assert status == 1
    assert "refuted" in out
    assert entropic("check", tmp_path / "bad.json")[0] == 1  # a sound certificate of a refutation: a negative verdict
    status, _, err = entropic("simulate", bad)
    assert status == 2
    assert "refuted" in err
    assert entropic("simulate", bad, "--uncertified")[0] == 0


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("gain = 0.02\n", 0, "proved by gain-lag-0"),
        ("gain = 0.1\n", 0, "proved by gain-at-target"),
        ("gain = -0.02\n", 1, "refuted by gain-lag-0"),
        ("gain = 9.0\n", 1, "refuted by gain-lag-0"),
    ],
)
def test_prove_and_check_agree_and_fit_80_columns(
    body: str, status: int, said: str, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flint")
    monkeypatch.setenv("COLUMNS", "80")
    run, cert = config(loop_temperature=FEEDBACK + body), tmp_path / "c.json"
    outputs = []
    for command in (("prove", run, "--out", cert, "--vocab", 32_000), ("check", cert), ("check", cert, run)):
        found, out, err = entropic(*command, "--json", tmp_path / "j.json")
        assert (found, err) == (status, "") if command[0] == "check" else found == status, err
        claims, _, rest = out.partition("assumptions, part of every claim:\n")
        assumed, loop, ends = rest.partition("temperature loop:")
        values = sorted(re.findall(r"(\w+)\s+=\s+([\d.e+-]+)", assumed))  # prove says what filled them, check cannot
        outputs.append((claims, values, loop + ends, json.loads((tmp_path / "j.json").read_text())["verdict"]))
        assert ("workload and cost model: " in assumed) == (command[0] == "prove")
    assert len(values) == 12
    assert outputs[0] == outputs[1] == outputs[2]
    verdict = outputs[0][-1]
    assert f"temperature loop: {said}" in out
    assert max(map(len, out.splitlines())) <= 80
    assert repr(verdict["limit"]) in out


def test_a_proof_that_is_refused_is_not_written(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flint")
    from proofs import search

    honest = search.prove
    monkeypatch.setattr(search, "prove", lambda *a, **k: {**honest(*a, **k), "subject": "0" * 64})
    status, out, err = entropic("prove", config(), "--out", tmp_path / "c.json", "--vocab", VOCAB)
    assert (status, out) == (2, "")
    assert "subject" in err
    assert not list(tmp_path.glob("*c.json*"))


# -- what does not: status 2, one clear line, no traceback ------------------------------------------------------------


def bad_config(body: str) -> Any:
    return lambda make, tmp: ("simulate", make(engine=body))


def bad_trace(content: bytes) -> Any:
    def arguments(make: Any, tmp: Path) -> tuple[object, ...]:
        (tmp / "t.csv").write_bytes(content)
        return ("simulate", make(), "--trace", tmp / "t.csv")

    return arguments


def bad_model(prepare: Any) -> Any:
    def arguments(make: Any, tmp: Path) -> tuple[object, ...]:
        folder = tmp / "model"
        folder.mkdir()
        path = prepare(folder) or folder
        return ("generate", "--prompt", "hi", "--model", path)

    return arguments


def bad_certificate(edit: Any) -> Any:
    def arguments(make: Any, tmp: Path) -> tuple[object, ...]:
        good = make(loop_temperature=FEEDBACK + "gain = 0.02\n")
        cert = tmp / "c.json"
        assert entropic("prove", good, "--out", cert, "--vocab", VOCAB)[0] == 0
        cert.write_text(edit(cert.read_text()))
        return ("check", cert, good)

    return arguments


def write(folder: Path, name: str, content: bytes | str) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def of_another_gain(make: Any, tmp: Path) -> tuple[object, ...]:
    cert = tmp / "c.json"
    entropic("prove", make(loop_temperature=FEEDBACK + "gain = 0.02\n"), "--out", cert, "--vocab", VOCAB)
    return ("simulate", make("other.toml", loop_temperature=FEEDBACK + "gain = 0.03\n"), "--certificate", cert)


def refuted_gain(make: Any, tmp: Path) -> tuple[object, ...]:
    run, cert = make(loop_temperature=FEEDBACK + "gain = 9.0\n"), tmp / "c.json"
    assert entropic("prove", run, "--out", cert, "--vocab", VOCAB)[0] == 1
    return ("simulate", run, "--certificate", cert)


BAD: dict[str, tuple[Any, list[str]]] = {
    # configs
    "config missing": (lambda make, tmp: ("simulate", tmp / "absent.toml"), ["absent.toml", "cannot read config"]),
    "config is a folder": (lambda make, tmp: ("simulate", tmp), ["cannot read config"]),
    "config not TOML": (lambda make, tmp: ("simulate", make(engine="pages =\n")), ["not TOML"]),
    "config unknown key": (bad_config("page = 3\n"), ["engine.page", "did you mean"]),
    "config out of range": (bad_config("pages = 0\n"), ["engine.pages", "got 0", "allowed"]),
    "config huge integer": (bad_config("pages = " + "9" * 400 + "\n"), ["engine.pages", "out of range"]),
    "config integer without end": (bad_config("pages = " + "9" * 5000 + "\n"), ["run.toml", "not TOML"]),
    "config huge hexadecimal": (bad_config("pages = 0x" + "f" * 5000 + "\n"), ["engine.pages", "a huge int"]),
    "config nested without end": (bad_config("pages = " + "[" * 3000 + "\n"), ["run.toml", "nested too deeply"]),
    "config key with a line break": (bad_config('"pa\\nges" = 3\n'), ["engine.pa\\nges", "unknown key"]),
    "config NUL in a path": (
        lambda make, tmp: ("simulate", make(workload='kind = "azure"\ntrace = "a\\u0000b"\n')),
        ["workload.trace", "NUL"],
    ),
    "config arrivals too late": (
        lambda make, tmp: ("simulate", make(workload="kind = 'poisson'\nrate_per_s = 5e-324\n")),
        ["run.toml", "rate_per_s", "too late"],
    ),
    "config wrong type": (bad_config("pages = 'many'\n"), ["engine.pages", "many"]),
    "config unknown law": (
        lambda make, tmp: ("simulate", make(loop_temperature="law = 'magic'\n")),
        ["loop.temperature.law", "magic", "feedback"],
    ),
    "config unknown preset": (
        lambda make, tmp: ("simulate", make(cost="preset = 'abacus'\n")),
        ["abacus"],
    ),
    "config outside the bank": (
        lambda make, tmp: ("simulate", make(loop_temperature="law = 'solve'\nt_min = 0.01\nt_max = 9.0\n")),
        ["loop.temperature", "entropy bank"],
    ),
    "config uncertified gain": (
        lambda make, tmp: ("simulate", make(loop_temperature=FEEDBACK + "gain = 9.0\n")),
        ["gain"],
    ),
    # banks
    "bank missing": (
        lambda make, tmp: ("simulate", make(cost="bank = 'absent.npz'\n")),
        ["absent.npz", "entropy bank"],
    ),
    "bank broken": (
        lambda make, tmp: (
            write(tmp, "b.npz", b"PK\x03\x04broken"),
            ("simulate", make(cost=f"bank = '{tmp}/b.npz'\n")),
        )[1],
        ["b.npz", "entropy bank"],
    ),
    # traces
    "trace missing": (lambda make, tmp: ("simulate", make(), "--trace", tmp / "no.csv"), ["no.csv"]),
    "trace empty": (bad_trace(b""), ["t.csv"]),
    "trace wrong header": (bad_trace(b"a,b,c\n1,2,3\n"), ["t.csv"]),
    "trace bad time": (bad_trace((HEADER + "yesterday,1,1\n").encode()), ["t.csv:2", "yesterday"]),
    "trace negative tokens": (bad_trace((HEADER + ROW + ROW.replace("100", "-3")).encode()), ["t.csv:3", "-3"]),
    "trace huge tokens": (bad_trace((HEADER + ROW.replace("100", "1e18")).encode()), ["t.csv:2", "1e18"]),
    "trace missing column": (bad_trace((HEADER + ROW + "2023-11-16 18:17:04.0,100\n").encode()), ["t.csv:3"]),
    "trace error on line 100": (bad_trace((HEADER + ROW * 98 + "bad,1,1\n").encode()), ["t.csv:100: TIMESTAMP"]),
    "trace across centuries": (bad_trace((HEADER + ROW + "9999-12-31 00:00:00,1,1\n").encode()), ["lines 2 and 3"]),
    "trace name too long": (lambda make, tmp: ("simulate", make(), "--trace", "a" * 5000), ["File name too long"]),
    "trace binary": (bad_trace(b"\x00\xff\xfe\x80"), ["t.csv"]),
    # certificates
    "certificate missing": (
        lambda make, tmp: ("check", tmp / "absent.json"),
        ["absent.json", "cannot read certificate"],
    ),
    "certificate truncated": (bad_certificate(lambda text: text[: len(text) // 2]), ["c.json", "not JSON"]),
    "certificate huge integer": (bad_certificate(lambda text: "9" * 5000), ["c.json", "not JSON"]),
    "certificate infinite gain": (
        bad_certificate(lambda text: text.replace('"gain": 0.02', '"gain": ' + "9" * 400)),
        ["c.json", "gain"],
    ),
    "certificate not an object": (bad_certificate(lambda text: "[1]"), ["c.json"]),
    "certificate NaN": (
        bad_certificate(lambda text: text.replace('"schema": 2', '"schema": NaN')),
        ["c.json", "finite"],
    ),
    "certificate edited gain": (
        bad_certificate(lambda text: text.replace('"gain": 0.02', '"gain": 0.01')),
        ["c.json: certificate: about.loop.temperature.gain", "which has 0.02 (got 0.01)"],
    ),
    "certificate other kind": (
        bad_certificate(lambda text: text.replace('"entropic-ctl"', '"luck"', 1)),
        ["c.json: certificate: kind: unknown kind (got 'luck')", "'entropic-ctl'", "entropic prove"],
    ),
    "certificate of an older schema": (
        bad_certificate(lambda text: '{"kind": "gain", "schema": 1, "verdict": "proved"}'),
        ["c.json: certificate: kind: unknown kind (got 'gain')", "entropic prove"],
    ),
    "certificate of schema 1": (
        bad_certificate(lambda text: text.replace('"schema": 2', '"schema": 1')),
        ["c.json: certificate: schema: unknown schema (got 1); allowed: 2", "entropic prove"],
    ),
    "certificate with a claim turned": (
        bad_certificate(lambda text: text.replace('"status": "proved"', '"status": "refuted"', 1)),
        ["c.json: certificate: claims[0] (v-max).status: not what the proof gives (got 'refuted')"],
    ),
    "certificate empty object": (bad_certificate(lambda text: "{}"), ["c.json", "entropic prove"]),
    "certificate of another gain": (
        of_another_gain,
        ["c.json: certificate: about.loop.temperature.gain", "which has 0.03 (got 0.02)"],
    ),
    "certificate of another vocabulary": (
        lambda make, tmp: (*bad_certificate(lambda text: text)(make, tmp), "--vocab", VOCAB + 1),
        [
            "c.json: certificate: about.vocab_size",
            f"than the {VOCAB + 1} tokens",
            f"(got {VOCAB})",
            "cost.bank",
            f"--vocab {VOCAB + 1}",
        ],
    ),
    "certificate refutes the gain": (
        refuted_gain,
        ["theorem 'gain-lag-0' is refuted", "the nearest certified gain is ", "--uncertified"],
    ),
    "certificate assumes nonsense": (
        lambda make, tmp: ("prove", make(), "--out", tmp / "x.json", "--assume", "rho=much"),
        ["--assume: rho: not a number (got 'much')"],
    ),
    "certificate assumes nothing": (
        lambda make, tmp: ("prove", make(), "--out", tmp / "x.json", "--assume", "rho"),
        ["--assume: rho: not NAME=VALUE (got 'rho')"],
    ),
    "certificate assumes what cannot be": (
        lambda make, tmp: ("prove", make(), "--out", tmp / "x.json", "--assume", "rho=-1"),
        ["--assume: rho: out of range (got -1.0); allowed: [0, 1000]"],
    ),
    "certificate assumes the unknown": (
        lambda make, tmp: ("prove", make(), "--out", tmp / "x.json", "--assume", "rhoo=1"),
        ["--assume: rhoo: unknown key", "did you mean 'rho'"],
    ),
    # logs
    "log missing": (lambda make, tmp: ("replay", tmp / "absent.jsonl"), ["absent.jsonl", "cannot read log"]),
    "log malformed": (
        lambda make, tmp: (write(tmp, "l.jsonl", "{}\nnonsense\n"), ("replay", tmp / "l.jsonl"))[1],
        ["l.jsonl"],
    ),
    # prompts and outputs
    "no prompt": (lambda make, tmp: ("generate",), ["exactly one prompt"]),
    "two prompts": (lambda make, tmp: ("generate", "--prompt", "a", "--prompt-file", make()), ["exactly one prompt"]),
    "blank prompt": (lambda make, tmp: ("generate", "--prompt", "  "), ["blank"]),
    "prompt not text": (
        lambda make, tmp: (write(tmp, "p.txt", b"\xff\xff"), ("generate", "--prompt-file", tmp / "p.txt"))[1],
        ["p.txt", "not UTF-8"],
    ),
    "json into nowhere": (lambda make, tmp: ("simulate", make(), "--json", tmp / "no" / "x.json"), ["--json", "mkdir"]),
    "json over the config": (
        lambda make, tmp: ("simulate", make(), "--json", tmp / "run.toml"),
        ["--json", "would overwrite"],
    ),
    "json over the trace": (
        lambda make, tmp: (
            write(tmp, "t.csv", HEADER + ROW),
            ("simulate", make(), "--trace", tmp / "t.csv", "--json", tmp / "." / "t.csv"),
        )[1],
        ["--json", "would overwrite"],
    ),
    "json over the results": (
        lambda make, tmp: ("simulate", make(), "--out", tmp / "x", "--json", tmp / "x"),
        ["--json", "would overwrite"],
    ),
    "certificate over the config": (
        lambda make, tmp: ("prove", make(), "--out", tmp / "run.toml"),
        ["--out", "would overwrite"],
    ),
    "json name too long": (lambda make, tmp: ("simulate", make(), "--json", tmp / ("a" * 300)), ["File name too long"]),
    "out is the root": (lambda make, tmp: ("simulate", make(), "--out", "/"), ["--out", "not a folder for results"]),
    "json is a folder": (lambda make, tmp: ("simulate", make(), "--json", tmp), ["--json", "is a folder"]),
    "out is a file": (lambda make, tmp: ("simulate", make(), "--out", make()), ["--out", "not a folder"]),
    # usage
    "unknown command": (lambda make, tmp: ("simulat",), ["No such command"]),
    "unknown option": (lambda make, tmp: ("simulate", make(), "--fast"), ["--fast"]),
    "negative seed": (lambda make, tmp: ("simulate", make(), "--seed", "-1"), ["--seed"]),
}
BAD_MODELS: dict[str, tuple[Any, list[str]]] = {
    "model missing": (bad_model(lambda folder: folder / "absent"), ["absent"]),
    "model folder empty": (bad_model(lambda folder: None), ["model"]),
    "model config not JSON": (bad_model(lambda folder: write(folder, "config.json", "{")), ["config.json"]),
    "model name too long": (bad_model(lambda folder: "a" * 5000), ["File name too long"]),
    "model architectures a number": (
        bad_model(lambda folder: write(folder, "config.json", '{"architectures": 3}')),
        ["config.json", "not a decoder"],
    ),
    "model config huge integer": (
        bad_model(lambda folder: write(folder, "config.json", '{"a": ' + "9" * 5000 + "}")),
        ["config.json", "not JSON"],
    ),
    "model GGUF broken": (
        bad_model(lambda folder: (write(folder, "m.gguf", b"GGUFxx"), folder / "m.gguf")[1]),
        ["m.gguf"],
    ),
    "model weights truncated": (
        bad_model(
            lambda folder: (
                write(
                    folder, "config.json", json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
                ),
                write(folder, "tokenizer.json", "{}"),
                write(folder, "model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"),
                None,
            )[3]
        ),
        ["safetensors"],
    ),
}


def assert_refused(arguments: tuple[object, ...], needles: list[str]) -> None:
    status, _, err = entropic(*arguments)
    assert status == 2, err
    flat = " ".join(err.split())
    assert "Traceback" not in err
    if err.startswith("entropic: "):  # not click's own usage message
        assert err.count("\n") == 1
    for needle in needles:
        assert needle in flat


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_status_2(case: str, config: Any, tmp_path: Path) -> None:
    if "certificate" in case or "gain" in case:
        pytest.importorskip("flint")
    make, needles = BAD[case]
    assert_refused(make(config, tmp_path), needles)


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models_are_refused_before_any_weight_is_set(case: str, config: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make, needles = BAD_MODELS[case]
    assert_refused(make(config, tmp_path), needles)


def test_a_process_of_its_own_prints_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "entropic_ctl.cli", "simulate", tmp_path / "absent.toml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("entropic: ")
    assert done.stderr.count("\n") == 1


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "entropic_ctl.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_goes_away_costs_neither_the_json_nor_the_exit_status(config: Any, tmp_path: Path) -> None:
    read, out = os.pipe()
    os.close(read)
    done = process("simulate", config(), "--json", tmp_path / "s.json", stdout=out)
    os.close(out)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("[")] == []  # progress, if it was slow
    assert json.loads((tmp_path / "s.json").read_text())["summary"]["requests_in"] == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line(config: Any) -> None:
    with Path("/dev/full").open("w") as full:
        done = process("simulate", config(), stdout=full)
    assert done.returncode == 2
    assert done.stderr == "entropic: output: No space left on device\n"


def test_an_output_encoding_that_lacks_a_character_is_no_error(config: Any) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = process("simulate", config(), env=environment, stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert "requests_in" in done.stdout


def test_narrow_output_folds_names_and_cuts_none(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert "…" not in entropic("simulate", config())[1]


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'simpy'", name="simpy")

    monkeypatch.setattr(cli_run.importlib, "import_module", absent)
    with pytest.raises(BadInputError, match=r"'simpy'.*pip install 'entropic-ctl\[sim\]'"):
        cli_run.need("sim.replica", "sim")


def test_a_bug_of_ours_is_not_dressed_up_as_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'sim.gone'", name="sim.gone")

    monkeypatch.setattr(cli_run.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        cli_run.need("sim.replica", "sim")


# -- results folders --------------------------------------------------------------------------------------------------


def test_a_results_folder_of_another_config_is_not_overwritten(config: Any, tmp_path: Path) -> None:
    out = tmp_path / "res"
    assert entropic("simulate", config(), "--out", out)[0] == 0
    assert entropic("simulate", config(), "--out", out)[0] == 0  # the same again
    before = (out / "summary.json").read_bytes()
    other = config("other.toml", engine="pages = 65\n")
    status, _, err = entropic("simulate", other, "--out", out)
    assert status == 2
    assert "--force" in err
    assert (out / "summary.json").read_bytes() == before
    assert entropic("simulate", other, "--out", out, "--force")[0] == 0
    assert json.loads((out / cli_output.MARKER).read_text())["config"]["engine"]["pages"] == 65


def test_force_does_not_delete_what_is_not_ours(config: Any, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    write(tmp_path / "home", "thesis.txt", "years of work")
    status, _, err = entropic("simulate", config(), "--out", tmp_path / "home", "--force")
    assert status == 2
    assert "--force does not delete" in " ".join(err.split())
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_a_failed_run_leaves_the_old_results(tmp_path: Path) -> None:
    subject = {"a": 1}
    with cli_output.folder(tmp_path / "res", subject) as work:
        write(work, "x", "old")

    def fail() -> None:
        with cli_output.folder(tmp_path / "res", subject) as work:
            write(work, "x", "new")
            raise BadInputError("no")

    with pytest.raises(BadInputError):
        fail()
    assert (tmp_path / "res" / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["res"]


def test_an_interrupted_run_keeps_what_was_finished(tmp_path: Path) -> None:
    def interrupted() -> None:
        with cli_output.folder(tmp_path / "res", {"a": 1}) as work:
            write(work, "half", "done")
            raise KeyboardInterrupt

    with pytest.raises(cli_output.Interrupted) as caught:
        interrupted()
    assert caught.value.kept == tmp_path / "res.partial"
    assert (tmp_path / "res.partial" / "half").read_text() == "done"
    assert not (tmp_path / "res").exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_exits_130_and_says_where_the_rest_is(config: Any, tmp_path: Path) -> None:
    long = config(workload="n_requests = 2000000\nprompt_tokens = 20\noutput_tokens = 6\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "entropic_ctl.cli", "simulate", long, "--out", tmp_path / "res"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell starts background jobs with SIGINT ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".res.*.part/run.json")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "res.partial" in err
    assert "Traceback" not in err
    assert (tmp_path / "res.partial" / "run.json").is_file()


@pytest.mark.parametrize("place", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_ctrl_c_during_imports_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "typer.py").write_text(place + "\n")
    command = [sys.executable, "-m", "entropic_ctl", "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "entropic: interrupted\n")


def test_ctrl_c_while_options_are_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TyperGroup, "parse_args", interrupted)
    assert entropic("--help") == (130, "", "entropic: interrupted\n")


# -- the live view ----------------------------------------------------------------------------------------------------


def test_sparkline() -> None:
    assert cli_live.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert cli_live.sparkline([1, 2, 3], 2) == "▆█"
    assert cli_live.sparkline([0.0, 0.0], 5) == "▁▁"
    assert cli_live.sparkline([float("nan")], 5) == ""
    assert cli_live.sparkline([9.0], 5, top=1.0) == "█"


def test_progress_without_a_terminal_is_a_line_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 1.9, 2.5, 2.5, 3.0, 4.6, 4.6])
    with cli_live.progress("work", clock=lambda: next(times)) as report:
        for i in range(5):
            report(f"part {i}", i / 10)
    assert capsys.readouterr().err.splitlines() == ["[ 20%] part 2", "[ 40%] part 4"]
