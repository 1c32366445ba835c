"""``python -m tl_iglens`` is the command ``iglens``."""

from .cli import main

if __name__ == "__main__":
    main()
