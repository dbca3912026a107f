"""Which C++ library the compiler links into a package.

Owns one fault and its cure. Where a compiler's folder has no `libstdc++.so`, or one that points
elsewhere, the linker takes the static archive: the package then holds a second copy of the library
beside the process's own, their tables of locales do not agree, and loading it ends in a
segmentation fault. The cure is a compiler of the same name that looks for the library in a folder
where it is the shared one. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

#: The shared library, as a process has it loaded and as a package should ask for it.
SHARED = "libstdc++.so.6"

#: Cannot be linked without the library, and compiles in little time.
_PROBE = "#include <string>\nstd::string f(const char* t) { return std::string(t) + t; }\n"


def links_shared(compiler: str, folder: Path) -> bool | None:
    """Whether what a compiler makes asks for the shared C++ library.

    Args:
        compiler: Command.
        folder: Where the trial is made.

    Returns:
        None where the compiler makes nothing.
    """
    source, made = folder / "probe.cpp", folder / "probe.so"
    source.write_text(_PROBE, encoding="utf-8")
    try:
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O0", str(source), "-o", str(made)],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
        return SHARED.encode() in made.read_bytes()
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        source.unlink(missing_ok=True)
        made.unlink(missing_ok=True)


def loaded_library() -> Path | None:
    """The shared C++ library that this process has loaded; None if it has none."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and Path(path).name.startswith("libstdc++.so"):
            return Path(path)
    return None


def sound_compiler(compiler: str, folder: Path, library: Path | None = None) -> str:
    """A command that compiles as `compiler` does and links the shared C++ library.

    Args:
        compiler: Command.
        folder: A folder that lives as long as the command is used.
        library: The shared library; the one that is loaded when None.

    Returns:
        `compiler` itself where it links the shared library, makes nothing, or cannot be helped.
    """
    if sys.platform != "linux" or links_shared(compiler, folder) is not False:
        return compiler
    library = library or loaded_library()
    whole = shutil.which(compiler)
    if library is None or whole is None:
        return compiler
    place = folder / "cxx"
    place.mkdir(mode=0o700, exist_ok=True)
    (place / "libstdc++.so").symlink_to(library)
    helped = place / Path(compiler).name
    helped.write_text(
        f'#!/bin/sh\nexec {shlex.quote(whole)} -L{shlex.quote(str(place))} "$@"\n', encoding="utf-8"
    )
    os.chmod(helped, 0o700)
    return str(helped) if links_shared(str(helped), folder) else compiler
