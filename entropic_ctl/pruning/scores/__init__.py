"""Page scores, one file each."""
