"""``python -m benchmarks``: see :mod:`benchmarks.compare`."""

if __name__ == "__main__":
    from benchmarks.compare import main  # here: each process that measures memory imports this file again

    main()
