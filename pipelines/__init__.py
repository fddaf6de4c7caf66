"""One thin verb a file: `python -m pipelines.<verb> CONFIG`."""
