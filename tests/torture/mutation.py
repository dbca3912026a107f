"""Small injuries to sound input: bytes flipped, cut, doubled and spliced, words put anywhere."""

from __future__ import annotations

import random
import string

WORDS = [
    b"\x00", b"\xff\xfe", b"\n", b"{", b"}", b"[", b"]", b"|", b"=", b"-", b'"', b"'", b",", b":",
    b"null", b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"9" * 30, b"true", b"[[[[[[[[", b"{}" * 5,
    b"\\u0000", b"\\ud800",
    "é\u202e\U0001f600".encode(), b"../../../etc/passwd", b"%s%n", b"A" * 300,
]  # fmt: skip


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One to eight small injuries."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, to = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        match rng.randrange(7):
            case 0 if out:
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[rng.randrange(len(out))] = rng.randrange(256)
            case 2:
                del out[at : min(to, at + rng.randrange(1, 40))]
            case 3:
                out[at:at] = rng.choice(WORDS)
            case 4:
                out[at:at] = out[at : min(to, at + 200)]
            case 5:
                piece = bytes(out[at : min(to, at + 20)])
                out[at : at + len(piece)] = rng.choice(WORDS)
            case _:
                if rng.random() < 0.1:
                    del out[at:]
                elif out:
                    out[rng.randrange(len(out))] = ord(rng.choice(string.printable))
    return bytes(out)
