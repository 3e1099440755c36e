"""Run the benchmarks: ``python -m benchmarks``, or one of them with its own options, ``python -m benchmarks.overhead``."""

from benchmarks import overhead

if __name__ == "__main__":
    overhead.main()
