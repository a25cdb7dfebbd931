"""What an Accelerator does with a CUDA device: precision, copies, checkpoints, and a device for two processes."""

from __future__ import annotations

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.usefixtures("on_gpu")

DEVICE = "cuda"


@pytest.fixture(scope="module")
def kernel(shared: Kernel) -> Kernel:
    """One for all: each run is the kernel's own process, and leaves nothing to the next."""
    return shared


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layers_compute_in_the_precision_and_weights_stay(kernel: Kernel, precision: str) -> None:
    cell = kernel.run(
        f"""
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
            def forward(self, x):
                inner = self.layer(x)
                self.seen = str(inner.dtype), inner.device.type
                return inner
        def look():
            accelerator = Accelerator(mixed_precision="{precision}")
            model = accelerator.prepare(Net())
            out = model(torch.ones(2, 4, device=accelerator.device))
            accelerator.backward(out.sum())
            weight = model.layer.weight
            return model.seen, str(out.dtype), str(weight.dtype), str(weight.grad.dtype), weight.device.type
        notebook_launcher(look, num_processes=1)
        """
    ).ok()
    half = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    wide = "'torch.float32'"
    shown = " ".join(cell.value.split())
    assert shown == f"(('{half}', '{DEVICE}'), {wide}, {wide}, {wide}, '{DEVICE}')"


def test_a_step_that_overflows_is_left_out_and_the_scale_falls(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from notebook_accel import GradScalerKwargs
        def train():
            # float16 ends at 65504: the first scale is too large for any gradient here, one of 2**8 is not
            scaling = GradScalerKwargs(init_scale=2.0**40, backoff_factor=2.0**-16)
            accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling])
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            x = torch.ones(8, 4, device=accelerator.device)
            seen = []
            for _ in range(6):
                before = model.weight.detach().clone()
                accelerator.backward((model(x) - 3).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen.append((accelerator.optimizer_step_was_skipped, torch.equal(before, model.weight)))
            steps = [skipped for skipped, _ in seen].count(False)
            return (seen[0], seen[-1], all(skipped == same for skipped, same in seen),
                    optimizer.param_groups[0]["lr"] == 0.01 * 0.5**steps, accelerator.scaler.get_scale() <= 2.0**24)
        notebook_launcher(train, num_processes=1)
        """
    ).ok()
    assert cell.value == "((True, True), (False, False), True, True, True)"


def test_copies_from_pinned_memory_arrive_whole(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from notebook_accel import DataLoaderConfiguration
        rows = torch.arange(64 * 1000, dtype=torch.float32).reshape(64, 1000)
        def read():
            accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
            loader = torch.utils.data.DataLoader(rows, batch_size=8, pin_memory=True)
            loader = accelerator.prepare(loader)
            batches = list(loader)
            return (accelerator.non_blocking, loader.pin_memory, {batch.device.type for batch in batches},
                    torch.equal(torch.cat(batches).cpu(), rows))
        notebook_launcher(read, num_processes=1)
        """
    ).ok()
    assert cell.value == f"(True, True, {{'{DEVICE}'}}, True)"


def test_a_checkpoint_holds_the_random_state_of_the_device(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def go_on():
            accelerator = Accelerator(mixed_precision="fp16")
            torch.manual_seed(5)
            model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer = accelerator.prepare(model, optimizer)
            x = torch.ones(8, 4, device=accelerator.device)
            def train():
                losses = []
                for _ in range(4):
                    loss = (model(x) - 3).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                return losses, torch.rand(3, device=accelerator.device).tolist(), accelerator.scaler.get_scale()
            train()
            accelerator.save_state("checkpoint")
            first = train()
            accelerator.load_state("checkpoint")
            second = train()
            places = {value.device.type for state in optimizer.state.values()
                      for name, value in state.items() if name != "step"}
            return first == second, len(set(first[0])) == 4, places
        notebook_launcher(go_on, num_processes=1)
        """
    ).ok()
    assert cell.value == f"(True, True, {{'{DEVICE}'}})"


def test_two_processes_train_on_one_device_over_gloo(kernel: Kernel) -> None:
    cell = kernel.run(
        f"""
        def train():  # gloo between the processes; what is on the device is put there by hand
            accelerator = Accelerator()
            torch.manual_seed(0)
            own = torch.nn.Linear(4, 1).to("{DEVICE}")
            alone = torch.nn.Linear(4, 1).to("{DEVICE}")
            alone.load_state_dict(own.state_dict())
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(own, optimizer, device_placement=[False, False])
            rows = torch.rand(16, 4, device="{DEVICE}")
            share = rows[accelerator.process_index::2]
            for _ in range(3):
                accelerator.backward(model(share).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
            for _ in range(3):
                alone(rows).square().mean().backward()
                by_hand.step()
                by_hand.zero_grad()
            weights = accelerator.gather(own.weight.detach().cpu())
            return (accelerator.num_processes, own.weight.device.type, torch.equal(weights[0], weights[1]),
                    torch.allclose(own.weight, alone.weight, atol=1e-5))
        notebook_launcher(train, num_processes=2, returns="all", environment={{"ACCELERATE_USE_CPU": "1"}})
        """
    ).ok()
    one = f"(2, '{DEVICE}', True, True)"
    assert " ".join(cell.value.split()) == f"[{one}, {one}]"
