"""Cases, strategies and judgement, shared by the tests, the fuzzer, the benchmark and the demo."""
