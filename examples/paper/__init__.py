"""The paper's numerical section as programs: ``python -m examples.paper --help``."""
