"""The scripts here run when the site is built; of this folder only the code in pages is a test."""

collect_ignore_glob = ["*.py"]
