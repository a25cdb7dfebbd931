"""Device maps, sizes and dispatched models beside Accelerate's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import notebook_accel
from notebook_accel import utils
from notebook_accel.utils import modeling
from tests.unit.big_models import INPUT, Words, half, kinds_of, save, words

accelerate = pytest.importorskip("accelerate")
import accelerate.utils.modeling as theirs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class A(nn.Module):
    pass


class B(nn.Module):
    pass


def random_net(chance: random.Random, *, tied: bool, unique: bool = True) -> nn.Module:
    """Return a tree of modules on the meta device; names occur once unless told otherwise."""
    count = 0

    def make(depth: int) -> nn.Module:
        nonlocal count
        made: nn.Module = chance.choice([A, B])()
        if chance.random() < 0.2:
            made.register_parameter("own", nn.Parameter(torch.empty(chance.randint(1, 60), device="meta")))
        for number in range(chance.randint(1, 4)):
            count += 1
            leaf = depth == 0 or chance.random() < 0.4
            sizes = chance.randint(1, 20), chance.randint(1, 20)
            child = nn.Linear(*sizes, bias=chance.random() < 0.5, device="meta") if leaf else make(depth - 1)
            made.add_module(f"m{count}x" if unique else f"m{number}", child)
        return made

    net = make(chance.randint(1, 3))
    layers = [part for part in net.modules() if isinstance(part, nn.Linear)]
    if tied and len(layers) > 1:
        one, other = chance.sample(layers, 2)
        other.weight = one.weight
    return net


def limits(chance: random.Random, total: int) -> dict[Any, int]:
    found: dict[Any, int] = {number: chance.randint(1, total) for number in range(chance.randint(0, 3))}
    if not found or chance.random() < 0.8:
        found["cpu"] = chance.randint(0, total)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_maps_of_random_models_are_the_same(tied: bool) -> None:
    for seed in range(150):
        chance = random.Random(seed)
        net = random_net(chance, tied=tied)
        sizes = dict(utils.compute_module_sizes(net))
        assert sizes == dict(theirs.compute_module_sizes(net))
        assert utils.calculate_maximum_sizes(net) == theirs.calculate_maximum_sizes(net)
        assert utils.find_tied_parameters(net) == theirs.find_tied_parameters(net)
        given = limits(chance, sizes[""])
        whole = chance.choice([[], ["A"], ["B"]])
        options = {"no_split_module_classes": whole, "clean_result": chance.random() < 0.7}
        ours = utils.infer_auto_device_map(net, given, **options)
        assert ours == dict(theirs.infer_auto_device_map(net, given, **options)), (seed, given, options)
        utils.check_device_map(net, ours)
        if len(given) > 2:
            for low_zero in (False, True):
                balanced = utils.get_balanced_memory(net, given, whole, low_zero=low_zero)
                assert balanced == theirs.get_balanced_memory(net, given, whole, low_zero=low_zero), seed


def test_where_maps_differ_and_why() -> None:
    # Accelerate looks for shared weights by parts of names: "m1." is in "m0.m1.", so these come along needlessly
    net = A()
    net.m1, net.m0 = nn.Linear(8, 8, device="meta"), A()
    net.m0.m1, net.m0.m2 = nn.Linear(8, 8, device="meta"), nn.Linear(8, 8, device="meta")
    net.m0.m2.weight = net.m0.m1.weight
    with pytest.raises(IndexError):
        theirs.infer_auto_device_map(net, {0: 700, "cpu": 9999})
    assert utils.infer_auto_device_map(net, {0: 700, "cpu": 9999}) == {"": 0}
    # it forgets the buffers of a module that it splits, and refuses its own map then
    model = words()
    split = theirs.infer_auto_device_map(model, {"cpu": 15000})
    with pytest.raises(ValueError, match="does not give any device"):
        theirs.check_device_map(model, split)
    utils.check_device_map(model, utils.infer_auto_device_map(model, {"cpu": 15000}, []))
    # without a list of classes, we keep whole what the model itself says
    model._no_split_modules = ["Block"]  # type: ignore[assignment]
    ours = utils.infer_auto_device_map(model, {"cpu": 15000})
    assert ours == theirs.infer_auto_device_map(model, {"cpu": 15000}, ["Block"])
    # a later part that fits an empty device is found where Accelerate's search gives up
    pair = nn.Sequential(nn.Linear(17, 9, device="meta"), nn.Linear(6, 11, device="meta"))
    options: dict[str, Any] = {"max_memory": {0: 473, 1: 408, "cpu": 141}, "fallback_allocation": True}
    assert theirs.infer_auto_device_map(pair, **options) == {"": "disk"}
    assert utils.infer_auto_device_map(pair, **options) == {"1": 1, "0": "disk"}
    # a truth value takes a byte in memory
    assert (utils.dtype_byte_size(torch.bool), theirs.dtype_byte_size(torch.bool)) == (1, 0.125)


def loaded(package: Any, checkpoint: Path, folder: Path, **options: Any) -> Any:
    with package.init_empty_weights():
        model = Words().eval()
    model.head.weight = model.words.weight  # Accelerate loses it
    return package.load_checkpoint_and_dispatch(
        model, str(checkpoint), half(), offload_folder=str(folder), **options
    )


def hooks_of(model: nn.Module) -> dict[str, str]:
    return {
        name: str(part._hf_hook).replace("device(type='cpu')", "cpu")
        for name, part in model.named_modules()
        if "_hf_hook" in vars(part)
    }


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("plain safetensors", {}),
        ("sharded safetensors", {"offload_buffers": True}),
        ("bin", {"preload_module_classes": ["Block"]}),
    ],
)
def test_dispatched_models_are_the_same(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    checkpoint = save(words(), tmp_path / "m", form)
    ours = loaded(notebook_accel, checkpoint, tmp_path / "ours", **options)
    other = loaded(accelerate, checkpoint, tmp_path / "theirs", **options)
    assert hooks_of(ours) == hooks_of(other)
    assert kinds_of(ours) == kinds_of(other)
    assert ours.hf_device_map == other.hf_device_map
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(ours(INPUT), other(INPUT))
    state, expected = modeling.get_state_dict_offloaded_model(ours), words().state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    weights = utils.OffloadedWeightsLoader(save_folder=tmp_path / "theirs")
    assert torch.equal(weights["blocks.4.first.weight"], words().blocks[4].first.weight)


def test_transformers_models_generate_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 100, "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(
        **sizes, intermediate_size=64, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0
    )
    t5 = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    t5.decoder_start_token_id, t5.eos_token_id = 0, None
    for kind, config in (("LlamaForCausalLM", llama), ("T5ForConditionalGeneration", t5)):
        torch.manual_seed(0)
        original = getattr(transformers, kind)(config).eval()
        original.save_pretrained(tmp_path / kind)
        with notebook_accel.init_empty_weights():
            model = getattr(transformers, kind)(config).eval()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        room = {"cpu": int(utils.compute_module_sizes(model)[""] * 0.6)}
        expected = theirs.infer_auto_device_map(model, room, list(model._no_split_modules))
        model = notebook_accel.load_checkpoint_and_dispatch(model, tmp_path / kind, "auto", room)
        assert model.hf_device_map == dict(expected) and "disk" in model.hf_device_map.values()
        for _ in range(2):
            found = [one.generate(INPUT, max_new_tokens=6, do_sample=False) for one in (model, original)]
            assert torch.equal(*found)


def test_plans_that_look_further_keep_every_limit() -> None:
    """Whatever shares weights: the plan is never more than a device may hold, in Accelerate's sense of holding."""
    for seed in range(400):
        chance = random.Random(seed)
        net = random_net(chance, tied=True)
        sizes = utils.compute_module_sizes(net)
        memory: dict[Any, int] = {
            number: chance.randint(1, 1 + sizes[""]) for number in range(chance.randint(1, 3))
        }
        memory["cpu"] = chance.randint(1, 1 + sizes[""])
        plan = utils.infer_auto_device_map(net, max_memory=memory, fallback_allocation=True)
        held: dict[Any, dict[int, int]] = {}
        for name, tensor in net.named_parameters(remove_duplicate=False):
            place = max(
                (each for each in plan if name == each or name.startswith(f"{each}.") or not each), key=len
            )
            held.setdefault(plan[place], {})[id(tensor)] = tensor.numel() * tensor.dtype.itemsize
        for device, tensors in held.items():
            assert device == "disk" or sum(tensors.values()) <= memory[device], (seed, plan, memory)
