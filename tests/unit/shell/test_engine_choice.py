"""Which engine a name in the configuration opens."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.engine.sharded_fold import BLOCK, shard_requests
from hypergpu.engine.engine import LocalEngine
from hypergpu.engine.opening import open_engine
from hypergpu.engine.ray_engine import RayEngine
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.tensors.layout import TensorSpec, layout_of
from tests.unit.aggregation.fold_files import FoldSetting, first_request


def test_names_open_engines_that_start_nothing_yet() -> None:
    assert isinstance(open_engine("local"), LocalEngine)
    assert isinstance(open_engine("ray"), RayEngine)
    assert isinstance(open_engine("ray://head:10001"), RayEngine)


@pytest.mark.parametrize("name", ["", "dask", "ray://", "ray:x", "local://x"])
def test_other_names_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(HyperGPUError) as failure:
        open_engine(name)
    assert failure.value.reason is Reason.ARGUMENT_INVALID
    assert failure.value.fix == "name local, ray, or ray://HOST:10001"


def test_small_model_is_folded_without_the_engine() -> None:
    engine = LocalEngine(1)
    heavy = HeavyWork(engine, Settings().engine_parameters_least)
    assert [heavy.engine_for(count) for count in ((8 << 20) - 1, 8 << 20)] == [None, engine]


def test_borders_of_shards_are_borders_of_blocks(tmp_path: Path) -> None:
    layout = layout_of([TensorSpec("large", (5 * BLOCK + 7,)), TensorSpec("small", (3,))])
    request = replace(first_request(tmp_path, [1], FoldSetting()), layout=layout)
    shards = shard_requests(request, {}, 4)
    assert [shard.has_integers for shard in shards] == [True, False, False, False]
    ranges = [each for shard in shards for each in shard.ranges]
    assert [each.start % BLOCK for each in ranges] == [0] * 7
    assert [(each.place, each.stop) for each in ranges[-2:]] == [(0, 5 * BLOCK + 7), (1, 3)]
