"""Which strategy for which size of model on which cards: what strategy=auto takes there, and of DeepSpeed's stages the
simplest that fits, by simulation.

python -m tests.engine.tables.guide             # fills measured/guide.md and guide_of_deepspeed.md; no GPU, ten minutes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.conf import ConfigSourceInfo, HydraConf, RuntimeConf
from hydra.utils import instantiate

from lightswitch.cluster import placement
from lightswitch.errors import Refused
from lightswitch.launch import fitting, plan
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.planning import candidates, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.device import World
from tests.engine.conftest import CHECKOUT
from tests.engine.tables import documents

CARDS = ("rtx_4090", "a100_40gb", "h100")
WORLDS = (World(1, 1), World(1, 8), World(8, 8))
# without what needs the run's directory and its name, which only a run has
RUN = ("precision=bf16-mixed", "trainer.default_root_dir=.", "name=guide", "~callbacks", "~logger")
CONF = CHECKOUT / "conf"


@dataclass(frozen=True)
class Model:
    size: str
    words: tuple[str, ...]


MODELS = (
    Model("10 M", ("model=gpt2", "model.layers=6", "model.width=192", "model.heads=6")),
    Model("124 M", ("model=gpt2",)),
    Model("774 M", ("model=gpt2_large",)),
    Model("1.6 B", ("model=gpt2_xl",)),
    Model("6.7 B", ("model=gpt_7b",)),
    Model("69 B", ("model=gpt_7b", "model.layers=80", "model.width=8192", "model.heads=64", "model.mlp_width=22016")),
)


def main() -> None:
    register_resolvers(placement.detect())
    head = ["model", "devices", *CARDS]
    for name, worlds, tried in (("guide", WORLDS, _by_auto), ("guide_of_deepspeed", WORLDS[1:], _by_deepspeed)):
        rows = [row for model in MODELS for row in _rows(model, worlds, tried)]
        documents.put(name, documents.markdown(head, rows))


def _by_auto(request: plan.Request) -> list[Candidate]:
    world = request.world
    return candidates.simplest(_folders(), world.nodes, world.devices_per_node, request.device)


def _by_deepspeed(request: plan.Request) -> list[Candidate]:
    every = candidates.every(_folders(), request.world.nodes, with_zero=True)
    return sorted((one for one in every if one.is_zero), key=lambda one: one.offloads)


def _rows(model: Model, worlds: Sequence[World], tried: Callable[[plan.Request], list[Candidate]]) -> list[list[str]]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [*model.words, "data=python_source", *RUN])
        cards = {
            name: instantiate(compose("config", [f"device={name}"]).plan.device, _convert_="all") for name in CARDS
        }
    cfg.micro_batch_size = 1
    samples = replace(plan.requested(cfg).samples, is_cut=False)  # no other micro batch is asked for
    rows = []
    for world in worlds:
        simulated: dict[Any, Any] = {}
        of = {name: plan.Request(cfg, card, world, samples, simulated=simulated) for name, card in cards.items()}
        rows.append([model.size, str(world.size), *(_cell(one, tried(one)) for one in of.values())])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def _cell(request: plan.Request, among: Sequence[Candidate]) -> str:
    request.cfg.global_batch_size = request.world.size  # a sample each
    request.cfg.trainer.num_nodes, request.cfg.trainer.devices = request.world.nodes, request.world.devices_per_node
    try:
        _, found = fitting.first_that_fits(request, among)
    except Refused:
        return "more devices"
    host = found.memory.host_bytes
    return f"`{report.name(found)}` {report.number(found.memory.bytes)}" + (f" + {report.number(host)}" if host else "")


def _folders() -> HydraConf:
    source = ConfigSourceInfo(path=str(CONF), schema="file", provider="main")
    runtime = RuntimeConf(version="1.3", version_base="1.3", cwd=".", config_sources=[source])
    return HydraConf(runtime=runtime)


if __name__ == "__main__":
    main()
