"""Wrong input of a command."""


class InputError(Exception):
    """What the user gave is wrong; the text says how, in one line."""

    def __init__(self, text: object) -> None:
        super().__init__(" ".join(str(text).split()))
