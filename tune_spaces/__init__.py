"""Studies for `python -m pipelines.tune`: one file each, with a `STUDY`."""
