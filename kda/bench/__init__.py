"""What `python -m kda bench` measures, and how it is shown."""

#: The suites, in the order in which they run; those of the forward have their shapes in `kda.bench.forward`.
SUITES = ("accuracy", "headline", "heads", "length", "ragged", "segments", "decode", "serving", "host")
