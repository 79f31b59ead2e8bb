//! Benchmarks of OrbitKV, one file per question, each beside the floor of the same machine. None is
//! written yet: `orbitkv replay` and `orbitkv demo` print times of whole workloads meanwhile.
