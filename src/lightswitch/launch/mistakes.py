"""What a user can mend: told in a line each, with exit code 2 and no traceback. A bug keeps its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

EXIT_CODE = 2


class Mistakes(Exception):
    """One line a problem: what was found, what was expected, what to type instead."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """Print a user's mistakes and exit; let everything else pass with its traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints a bug in its own way and exits with 1
    try:
        yield
    except Mistakes as mistakes:
        _exit(mistakes.problems)
    except MissingConfigException as missing:
        _exit([_missing_choice(missing)])
    except (ConfigCompositionException, OmegaConfBaseException, HydraException) as error:
        if not _is_about_the_command_line(error):
            raise
        _exit([_composition(error)])


def nearest(word: str, choices: Iterable[str]) -> str:
    """' did you mean X?' for the most similar choice, or nothing."""
    close = get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def _exit(problems: list[str]) -> None:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(EXIT_CODE)


def _missing_choice(missing: MissingConfigException) -> str:
    name = missing.missing_cfg_file or ""
    group, _, choice = name.rpartition("/")
    options = sorted(missing.options or [])
    if not options:
        return str(missing)
    return (
        f"{group}={choice}: there is no such {group}.{nearest(choice, options)} Choices: {', '.join(options)}"
    )


def _is_about_the_command_line(error: BaseException) -> bool:
    """Composing happens before main is called; an error of the same class from inside main is a bug."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "run_job":
            return False
        traceback = traceback.tb_next
    return True


def _composition(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        parent, key = cause.parent_node, str(cause.key)
        return f"{cause.full_key}: there is no such key.{nearest(key, map(str, parent))}"
    lines = [line.strip() for line in [*str(error).splitlines(), *str(cause or "").splitlines()]]
    shown = [line for line in lines if line and not line.startswith(("See https", "object_type", "full_key"))]
    return "; ".join(dict.fromkeys(shown))
