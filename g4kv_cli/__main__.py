"""``python -m g4kv_cli`` is the same as ``g4kv``."""

from g4kv_cli.start import main

if __name__ == "__main__":
    main()
