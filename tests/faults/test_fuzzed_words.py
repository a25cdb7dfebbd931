"""Any text in a variable, an argument, a field of the form or a magic: a value comes out, or a sentence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from notebook_accel import environ, topology, tpu
from notebook_accel.checkpointing import shards
from notebook_accel.config import argument_checks, basic, schema
from notebook_accel.config.schema import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.launch.checks import node_options
from notebook_accel.launch.engines.nodes.node_info import NodeInfo, find_disagreements, find_duplicates
from notebook_accel.launch.worker import environment
from notebook_accel.trust import secret
from tests.faults.fuzzing import JSON, TEXTS, fuzz
from tests.unit.jobs import make_job

WORDS = st.one_of(
    TEXTS, st.sampled_from(["1", " 2 ", "true", "1:4", "4:1", ",", "2,2,1", "0,1", "1_0", "+1", "0x1"])
)
VARIABLES = WORDS.map(lambda text: text.replace("\0", "")).filter(lambda text: _is_encodable(text))


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
NUMBERS = st.sampled_from(["0", "1", "2", "-1", "", "3"])


@fuzz()
@given(st.dictionaries(st.sampled_from(RANKS), NUMBERS | VARIABLES))
def test_variables_of_ranks(values: dict[str, str]) -> None:
    with environ.clear_environment():
        environ.put(values)
        try:
            found = topology.from_environ()
        except ValueError:
            return
    assert 0 <= found.rank < found.world_size and 0 <= found.local_rank < found.local_world_size


@fuzz()
@given(st.sampled_from(sorted(environ.TABLE)), VARIABLES)
def test_any_variable_as_number_and_truth_value(name: str, text: str) -> None:
    with environ.patch_environment(**{name: text}):
        for read in (environ.integer, environ.flag):
            try:
                assert read(name) is None or isinstance(read(name), int)
            except environ.VariableError as error:
                assert name in str(error)


@fuzz()
@given(VARIABLES)
@example("9" * 5_000)
@example("4,2")
def test_threads(text: str) -> None:
    with environ.patch_environment(OMP_NUM_THREADS=text):
        assert environment.count_threads(make_job()) >= 1


@fuzz()
@given(VARIABLES, VARIABLES, VARIABLES)
@example("9" * 5_000, "9" * 5_000 + ",1", "")
def test_variables_of_a_tpu(bounds: str, hosts: str, chips: str) -> None:
    with environ.patch_environment(
        PJRT_DEVICE="TPU", TPU_PROCESS_BOUNDS=bounds, TPU_CHIPS_PER_HOST_BOUNDS=hosts, TPU_VISIBLE_CHIPS=chips
    ):
        assert tpu.chips() >= 0 and tpu.num_processes() >= 0


@fuzz()
@given(WORDS | JSON)
def test_a_port(value: Any) -> None:
    port = argument_checks.parse_port(value)
    assert port is None or 0 <= port <= 65535
    assert list(argument_checks.check_port("use_port", value)) == [] or port is None


@fuzz()
@given(WORDS)
def test_a_range_of_nodes(text: str) -> None:
    if not argument_checks.find_range_error(text):
        least, most = map(int, text.split(":"))
        assert 1 <= least <= most


@fuzz(100)
@given(WORDS, WORDS | st.none(), JSON)
def test_where_nodes_meet(endpoint: str, address: str | None, settings: Any) -> None:
    assume(not any(character.isalpha() for character in endpoint + (address or "")))  # names are looked up
    options = {
        "num_nodes": 2,
        "master_addr": address or "127.0.0.1",
        "use_port": None,
        "node_rank": 1,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": endpoint,
        "rdzv_id": "x",
        "rdzv_conf": None,
        "secret": None,
    }
    node_options.resolve(options, ())
    assert isinstance(list(argument_checks.check_rendezvous("rdzv_conf", settings)), list)


@fuzz(100)
@given(WORDS)
@example("\ud800" * 20)
def test_a_secret(text: str) -> None:
    try:
        found = secret.find_secret(text)
    except ValueError as error:
        assert len(text) < secret.LEAST_LENGTH and (len(text) < 4 or text not in str(error))
        return
    assert secret.Trust(found).key != secret.OPEN.key


@fuzz()
@given(WORDS | JSON)
def test_a_size(value: Any) -> None:
    with contextlib.suppress(ValueError):
        assert shards.parse_size(value) > 0


@fuzz()
@given(WORDS)
def test_a_template(text: str) -> None:
    assert isinstance(argument_checks.find_template_error(text), str)


@fuzz(100)
@given(st.lists(st.tuples(st.integers(-1, 3), TEXTS, st.dictionaries(TEXTS, TEXTS)), min_size=1, max_size=3))
def test_what_nodes_say_of_themselves(said: list[tuple[int, str, dict[str, str]]]) -> None:
    nodes = []
    for rank, host, same in said:
        try:
            nodes.append(NodeInfo(node_rank=rank, host=host, processes=1, same=same))
        except ValueError:
            continue
    if nodes:
        assert isinstance(find_disagreements(nodes, complete=True) + find_duplicates(nodes), list)


# -- the form, and magics


def make_form(folder: Path) -> Any:
    from notebook_accel.widgets import ConfigForm

    return ConfigForm(LaunchConfig(), path=folder / "config.yaml")


OPTIONS = schema.table()


@fuzz(100)
@given(st.lists(st.tuples(st.sampled_from(OPTIONS), WORDS), min_size=1, max_size=4))
@example([(option, "0x" + "f" * 5_000) for option in OPTIONS])
@example([(option, "9" * 5_000) for option in OPTIONS])
@example([(option, "nan") for option in OPTIONS])
@example([(option, "-inf") for option in OPTIONS])
def test_a_page_may_send_any_text(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[Any, str]]
) -> None:
    from notebook_accel.widgets.draft import Draft, as_table, read_text, write_text

    draft = Draft(basic.detect())
    for option, text in said:
        value = read_text(option, text)
        draft.change(option.name, value)
        assert isinstance(write_text(value), str) and isinstance(as_table(draft), str)
    try:
        config = draft.config
    except ConfigError:
        assert draft.sentences
        return
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    assert LaunchConfig.read(config.write(path, replace=True)) == config


@fuzz(60)
@given(st.lists(st.tuples(st.sampled_from(["text", "path", "load", "save"]), WORDS), min_size=1, max_size=4))
@example([("path", "a\0.yaml"), ("load", ""), ("save", "")])
@example([("path", "x" * 5_000 + ".yaml"), ("load", ""), ("save", "")])
@example([("path", "~nobody\0.yaml"), ("load", ""), ("save", "")])
@example([("path", "\ud800.yaml"), ("load", ""), ("save", "")])
def test_clicks_of_a_page(tmp_path_factory: pytest.TempPathFactory, said: list[tuple[str, str]]) -> None:
    folder = tmp_path_factory.getbasetemp() / "form"
    folder.mkdir(exist_ok=True)
    form = make_form(folder)
    for kind, text in said:
        if kind == "text":
            form.view.fields["num_processes"].control.value = text
        elif kind == "path":
            form.view.path.value = str(folder / text.replace("/", "")) if "/" in text else text
        elif kind == "load":
            form.view.load.click()
        elif not form.view.save.disabled and form.path.is_relative_to(folder):
            form.view.save.click()
        assert "<script" not in form.view.status.value + form.view.preview.value


@fuzz()
@given(WORDS)
@example("0-99999999999")
@example("9" * 5_000)
def test_ranks_of_a_magic(text: str) -> None:
    from IPython.core.error import UsageError

    from notebook_accel.widgets import cells

    parse: list[Callable[[str], Any]] = [cells._parse_ranks, cells._parse]
    for each in parse:
        with contextlib.suppress(UsageError):
            each(text)
