"""``python -m benchmarks.untuned``: see :mod:`benchmarks.untuned.command`."""

if __name__ == "__main__":
    from benchmarks.untuned.command import main  # here: each process that runs jobs imports this file again

    main()
