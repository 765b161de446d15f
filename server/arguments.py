"""Arguments: what neither command line takes, `mlxtape` or `replay`, whatever the command.

Owns these refusals; knows no command and no option by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

_BARE = re.compile("(--[^= ]+=|-[a-z])--")


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError, in one sentence, for an argument that is no UTF-8 (it could be written to
    no tape and in no report), and for `--` as an option's value, of which argparse makes an empty
    list.
    """
    for text in arguments:
        if not _is_utf8(text):
            raise ValueError(f"the argument {text!a} is not UTF-8: give the file another name")
    for text in takewhile(lambda it: it != "--", arguments):
        if match := _BARE.fullmatch(text):
            raise ValueError(f"{match[1].rstrip('=')} needs a value, and -- is none")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
