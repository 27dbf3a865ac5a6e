"""The way into train.py: from the command line to a composed config, or to a line that says what is wrong with it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from lightswitch.launch import resolvers
from lightswitch.launch.arguments import normalised
from lightswitch.launch.mistakes import told_in_a_line


def entry(config_path: str, config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """`hydra.main`, with arguments as people type them and errors as people read them."""

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        composed = hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)(main)

        @functools.wraps(main)
        def run() -> None:
            resolvers.register()
            with told_in_a_line():
                sys.argv[1:] = normalised(sys.argv[1:])
                composed()

        return run

    return decorate
