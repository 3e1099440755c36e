"""``python -m benchmarks.gpu``: see :mod:`benchmarks.gpu.check`."""

if __name__ == "__main__":
    from benchmarks.gpu.check import main  # here: processes that are spawned import this file again

    raise SystemExit(main())
