"""How messages count: `1 build is`, `2 builds are`, and `0.5 s` whatever the size.

Owns words of numbers alone, and knows nothing that is counted.
"""

from __future__ import annotations


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """A number with its noun, in thousands: `1 build`, `2 builds`, `1,204 models`.

    Args:
        number: How many.
        singular: The noun for one.
        plural: The noun for all else; the singular with an s when None.
    """
    noun = singular if number == 1 else plural or f"{singular}s"
    return f"{number:,} {noun}"


def verb(number: int, singular: str, plural: str, of: int | None = None) -> str:
    """The verb of a number that was counted: `1 build is`, `2 builds are`, `1 of 3 builds is`.

    Args:
        number: How many the verb is said of.
        singular: The verb of one.
        plural: The verb of all else.
        of: Of how many, where that is said too: `0 of 1 build is`.
    """
    return singular if 1 in (number, of) else plural
