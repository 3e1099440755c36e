"""The command line; a library that it needs and does not find is named in a sentence."""

EXTRAS = ("filelock", "matplotlib", "pandas", "rich", "scipy", "sklearn", "torchvision", "tqdm", "tyro")

if __name__ == "__main__":
    try:
        from examples.paper.cli import main

        main()
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in EXTRAS:
            raise
        raise SystemExit(f'{missing} is not installed. In the checkout: pip install -e ".[examples]"') from None
