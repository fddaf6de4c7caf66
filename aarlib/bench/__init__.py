"""Each speed claim measured against the plain way, in one run; equal numbers asserted first."""
