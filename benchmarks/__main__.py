"""Run the benchmarks: ``python -m benchmarks``; one of them with its options: ``python -m benchmarks.overhead``."""

from benchmarks import overhead

if __name__ == "__main__":
    overhead.main()
