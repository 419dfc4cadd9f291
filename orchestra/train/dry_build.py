"""`python -m orchestra.train.dry_build CONFIG.yaml --world-size N`: see `memory.dry_run`."""

from orchestra.train.memory.dry_run import main

if __name__ == "__main__":
    main()
