"""``python -m benchmarks.time_to_loss``."""

from benchmarks.time_to_loss.command import main

if __name__ == "__main__":
    main()
