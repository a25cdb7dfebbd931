"""The accelerator's checkpoints."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from .. import checkpointing
from ..caller import warn
from ..errors import CheckpointError
from ..handlers import ProjectConfiguration
from .base import Shared
from .kinds import require_hook, require_model

if TYPE_CHECKING:  # imported by those who save
    from ..checkpointing import background, write
    from ..checkpointing.folder import PathLike, Staging
    from ..checkpointing.parts import CollectiveFolder, Parts


class SavePart(Shared):
    """Save and load everything that was prepared or registered, whole or not at all."""

    _custom_objects: list[Any]
    _save_hooks: dict[int, Callable[..., None]]
    _load_hooks: dict[int, Callable[..., None]]
    _writer: background.BackgroundWriter | None
    project_configuration: ProjectConfiguration

    @property
    def project_dir(self) -> PathLike | None:
        """Folder for what the run writes."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> PathLike | None:
        """Folder for logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let `save_state` and `load_state` save and load these objects too.

        Args:
            objects: any with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: an object has not both methods.
        """
        wrong = {
            index: item
            for index, item in enumerate(objects)
            if not callable(getattr(item, "state_dict", None))
            or not callable(getattr(item, "load_state_dict", None))
        }
        if wrong:
            listed = ", ".join(
                f"Item at index {index}, {type(item).__name__} {item!r}" for index, item in wrong.items()
            )
            raise ValueError(
                f"objects to register need state_dict and load_state_dict, these lack one: {listed}"
            )
        self._custom_objects += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a hook on every rank before models are saved.

        Args:
            hook: called as `hook(models, weights, output_dir)`. What it removes from the list `weights` is not
                saved. Files that it writes to `output_dir` become part of the checkpoint.

        Returns:
            A handle, whose `remove` removes the hook.

        Raises:
            TypeError: it cannot be called.
        """
        require_hook(hook)
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a hook on every rank before models are loaded.

        Args:
            hook: called as `hook(models, input_dir)`. What it removes from the list `models` is not loaded.

        Returns:
            A handle, whose `remove` removes the hook.

        Raises:
            TypeError: it cannot be called.
        """
        require_hook(hook)
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_state(
        self,
        output_dir: PathLike | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save everything prepared or registered, and all random states; every process calls it.

        The folder gets its name once all its files are on the disk: a process that dies at any instant leaves
        the checkpoint that was there before. Other files in the folder stay. Where two runs save to one folder at a
        time, the last save stays, whole; with automatic naming the second one raises.

        Gradients are not saved. Between two batches of one accumulation this warns: the step after resuming would lack
        those so far.

        Args:
            output_dir: the folder; with automatic naming it is `project_dir/checkpoints/checkpoint_N` instead.
            safe_serialization: weights as safetensors; False uses torch.save.
            async_save: copy all tensors, return, and write in a thread. The next save or load, `end_training` and
                the end of the process wait for it; its error is raised there. After an exception the launcher leaves it
                30 seconds; where it has to be dropped, the cell says so. All processes need to see the folder.
            save_model_func_kwargs: arguments of DeepSpeed's `save_checkpoint`; not supported, each is an error.

        Returns:
            The folder.

        Raises:
            ValueError: no folder, or one that cannot be a checkpoint.
            CheckpointError: on all processes, if one could not write, or with `async_save` does not see the folder; the
                old checkpoint is untouched.
        """
        if save_model_func_kwargs:
            raise ValueError(f"save_state does not know {', '.join(save_model_func_kwargs)}: leave it out")
        self._wait_for_writer()
        target, keep = self._save_target(output_dir)
        topology = self._runtime.topology
        barrier: write.ErrorBarrier = checkpointing.write.CollectiveErrorBarrier(self._runtime.comm)
        token = self._runtime.comm.broadcast_object(checkpointing.folder.make_token())
        staging = checkpointing.folder.Staging(target=target, token=token)
        with checkpointing.write.remove_if_interrupted(staging, topology):
            ranks = checkpointing.write.start(staging, topology, barrier, in_background=async_save)
            files, folders = self._collect(staging, safe_serialization)
            if async_save:
                files, folders = self._snapshot(files, folders, staging)
            plan = checkpointing.write.Plan(
                staging=staging,
                ranks=ranks,
                files=files,
                folders=folders,
                rank=topology.rank,
                facts={**self._describe_spread(), "step": self._step},
                replaces=not self.project_configuration.automatic_checkpoint_naming,
                keep=keep,
            )
            if not async_save:
                checkpointing.write.finish(plan, barrier)
        if async_save:
            self._write_in_background(plan)
        self._warn_of_gradients()  # last: other ranks would wait for one on which a warning is an error
        vars(self.project_configuration)["iteration"] += 1  # without the checks for users' values
        return target

    def _collect(
        self, staging: Staging, safe_serialization: bool
    ) -> tuple[list[write.File], list[CollectiveFolder]]:
        """Return what this rank writes, once all ranks have found what they write."""
        error = None
        files: list[write.File] = []
        folders: list[CollectiveFolder] = []
        try:
            files, folders = self._files_to_save(staging.path, safe_serialization)
        except Exception as found:  # the other ranks wait for the outcome
            error = found
        self._require_all(error, staging)
        return files, folders

    def _describe_spread(self) -> dict[str, int]:
        """Return over how many processes, and over how many shares of the data, this run is spread."""
        return {"world_size": self._runtime.topology.world_size, "data_shares": self._strategy.num_shares}

    def _list_counts(self) -> dict[tuple[int, ...] | None, int]:
        """Return the counts of batches: those of prepared models by their places, which are the same in another run."""
        known = frozenset(range(len(self._models)))
        return {
            None if places is None else tuple(sorted(places)): count
            for places, count in self._counts.items()
            if places is None or places <= known
        }

    def _warn_of_gradients(self) -> None:
        flags = self._runtime.gradient
        others = [count for models, count in self._counts.items() if models not in (None, self._counted)]
        is_between = not flags.sync_gradients or any(count % flags.num_steps for count in others)
        if is_between and self._runtime.topology.rank == 0:
            warn(
                "save_state in the middle of an accumulation: the gradients so far are not saved, so a run that goes "
                "on from here computes its first step without them; save where accelerator.sync_gradients is True",
            )

    def _wait_for_writer(self) -> None:
        """Return once the checkpoint that a thread writes is on the disk; CheckpointError if it was not written."""
        if self._writer is not None:
            self._writer.wait()

    def _snapshot(
        self, files: list[write.File], folders: list[CollectiveFolder], staging: Staging
    ) -> tuple[list[write.File], list[CollectiveFolder]]:
        """Return what is to be written with contents that training does not change any more."""
        if self._writer is None:
            self._writer = checkpointing.background.BackgroundWriter()
        error = None
        try:
            folders = [part.snapshot(self._writer.copies) for part in folders]
            files = checkpointing.background.snapshot(files, self._writer.copies)
        except Exception as found:  # the other ranks wait for the outcome
            error = found
        self._require_all(error, staging)
        return files, folders

    def _write_in_background(self, plan: write.Plan) -> None:
        assert self._writer is not None
        staging = plan.staging
        barrier = checkpointing.background.FileErrorBarrier(
            staging.barrier_files, plan.rank, self._runtime.topology.world_size
        )
        folders = [staging.path, staging.barrier_files]
        self._writer.start(lambda: checkpointing.write.finish(plan, barrier), staging.target, folders)

    def _require_all(self, error: Exception | None, staging: Staging) -> None:
        """Raise this rank's error, or tell of another rank's, with nothing left of the new checkpoint."""
        failed = self._exchange(error)
        if not failed:
            return
        if self._runtime.topology.is_local_main:
            checkpointing.write.remove(staging)
        if error is not None:
            raise error
        raise CheckpointError(
            f"checkpoint {staging.target} was not written, what was there before is untouched: {failed}"
        )

    def _exchange(self, error: Exception | None) -> str:
        """Return which ranks failed at what, once all ranks have come here; nothing where none did."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        errors = self._runtime.comm.all_gather_object(text)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)

    def _save_target(self, output_dir: PathLike | None) -> tuple[Path, int | None]:
        config = self.project_configuration
        if not config.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or a ProjectConfiguration with automatic naming"
                )
            target = checkpointing.folder.resolve(output_dir)
            checkpointing.folder.check(target)
            return target, None
        target = self._checkpoints() / f"checkpoint_{config.iteration}"
        if self._runtime.comm.broadcast_object(target.exists()):
            raise ValueError(
                f"{target} exists: load_state() goes on after the newest one, or set "
                "project_configuration.iteration to the number to go on with"
            )
        return target, config.total_limit

    def _checkpoints(self) -> Path:
        if self.project_dir is None:
            raise ValueError(
                "automatic checkpoint naming needs a project_dir: give it to ProjectConfiguration"
            )
        return Path(os.path.abspath(Path(self.project_dir).expanduser())) / "checkpoints"

    def _parts(self, models: list[torch.nn.Module]) -> Parts:
        return checkpointing.parts.Parts(
            models=models,
            owners=[self._strategy.unwrap(model, keep_torch_compile=False) for model in self._models],
            optimizers=[optimizer.optimizer for optimizer in self._optimizers],
            schedulers=[scheduler.scheduler for scheduler in self._schedulers],
            loaders=self._dataloaders,
            scaler=self._precision.scaler,
            custom=self._custom_objects,
        )

    def _files_to_save(
        self, where: Path, safe_serialization: bool
    ) -> tuple[list[write.File], list[CollectiveFolder]]:
        strategy, runtime = self._strategy, self._runtime
        is_collective = strategy.saves_collectively
        parts = self._parts(self._models)
        # collectives come first: a hook or a registered object may fail on one rank
        weights = [strategy.weights(model) for model in self._models]
        states = [] if is_collective else list(map(strategy.optimizer_state, parts.optimizers))
        if self._save_hooks:
            models = [strategy.unwrap(model) for model in self._models]
            for hook in list(self._save_hooks.values()):
                hook(models, weights, str(where))
        files = checkpointing.write.own_files(
            parts, runtime.topology.rank, self._step, self._list_counts(), runtime.device
        )
        folders = strategy.collective_folders(parts, weights)
        if self._writes_shared_files():
            files += [] if is_collective else checkpointing.write.model_files(weights, safe_serialization)
            files += checkpointing.write.shared_files(parts, states, runtime.device)
        return files, folders

    def _writes_shared_files(self) -> bool:
        """Return True in the process that writes what is the same in all: one of the run, or one of each node."""
        topology = self._runtime.topology
        return (topology.local_rank if self.project_configuration.save_on_each_node else topology.rank) == 0

    def load_state(
        self,
        input_dir: PathLike | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> bool:
        """Load what `save_state` or Accelerate saved; every process calls it.

        `load_state("latest")`, with automatic naming, is for a function that may be started again: it loads the newest
        checkpoint, and returns False without changing anything where none has been saved yet.

        All files are checked first: where one is damaged or does not fit, nothing is changed on any process. The
        number of processes may differ from that of the save; random states of processes that it did not have
        are derived from those of rank 0 and the rank. Registered objects and the states of stateful loaders are
        unpickled, which runs code: load checkpoints that you trust.

        In a checkpoint that was saved in the middle of an epoch, loaders prepared with `use_stateful_dataloader` go
        on after the batch they were at, if as many processes saved it; else they start a new epoch. Others go on
        through `skip_first_batches(loader, n)`, in the order of that epoch, whatever the number of processes was; an
        iteration without it starts a new one.

        Args:
            input_dir: the folder; with automatic naming, None or "latest" is the newest one, and the next save
                gets the number after it. Where there is none, None is an error.
            load_kwargs: arguments of `torch.load` for optimizers and schedulers.
            load_model_func_kwargs: arguments of the models' `load_state_dict`; a `map_location` is accepted
                and not needed, as tensors are read to where they are.

        Returns:
            Whether something was loaded: False for "latest" only, alike on all processes.

        Raises:
            ValueError: there is no such folder.
            CheckpointError: the checkpoint is damaged or does not fit; it names file and key.
        """
        self._wait_for_writer()
        source = self._load_source(input_dir)
        if source is None:
            return False
        target, number = source
        options = {key: value for key, value in load_model_func_kwargs.items() if key != "map_location"}
        tries = itertools.count()
        while not self._load(target, load_kwargs or {}, options, next(tries)):
            pass
        if number is not None:
            self.project_configuration.iteration = max(self.project_configuration.iteration, number + 1)
        return True

    def _load(self, target: Path, options: dict[str, Any], model_options: dict[str, Any], tries: int) -> bool:
        """Load a checkpoint; return False where a save has replaced it meanwhile: there may be parts of both."""
        models = [self._strategy.unwrap(model) for model in self._models]
        found_there = checkpointing.read.identify(target, tries)
        error: Exception | None = None
        loading = checkpointing.read.Loading()
        try:
            for hook in list(self._load_hooks.values()):
                hook(models, str(target))
            loading = checkpointing.read.plan(
                target,
                self._parts([self._strategy.unwrap(model, keep_torch_compile=False) for model in models]),
                self._runtime.topology.rank,
                self._describe_spread(),
                self._runtime.device,
                count_models=not self._load_hooks,
                options=options,
                model_options=model_options,
                load_folders=self._strategy.load_collective_folders,
            )
        except Exception as found:  # the other ranks wait for the outcome
            error = found
        gather = self._runtime.comm.all_gather_object
        if not any(gather(error is not None)):
            try:
                loading.run()
            except Exception as found:
                error = found
        is_there = checkpointing.read.identify(target, tries) == found_there
        outcomes = gather((is_there, None if error is None else str(error)))
        if not all(is_there for is_there, _ in outcomes):
            return False
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(outcomes):
            if text is not None:
                raise CheckpointError(f"rank {rank} cannot load {target}: {text}")
        if loading.step is not None:
            self.step = loading.step
            self._counts |= {
                None if places is None else frozenset(places): count
                for places, count in loading.counts.items()
            }
        return True

    def _load_source(self, input_dir: PathLike | None) -> tuple[Path, int | None] | None:
        """Return the folder and its number, where it has one; None where the latest is asked for and there is none."""
        automatic = self.project_configuration.automatic_checkpoint_naming
        if input_dir is None and not automatic:
            raise ValueError("load_state needs input_dir, or a ProjectConfiguration with automatic naming")
        if automatic and (input_dir is None or os.fspath(input_dir) == "latest"):
            found = self._runtime.comm.broadcast_object(checkpointing.names.checkpoints(self._checkpoints()))
            if not found and input_dir is not None:
                return None
            if not found:
                raise ValueError(f"{self._checkpoints()} holds no checkpoint to load")
            number, target = found[-1]
            return target, number
        assert input_dir is not None
        target = checkpointing.folder.resolve(input_dir)
        # another save may be between two renames
        if not any(checkpointing.folder.recover(target) for _ in range(3)):
            raise ValueError(f"{target} is no folder with a checkpoint")
        return target, None

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object in rank 0, or once on each node with `save_on_each_node` of the project.

        Args:
            obj: any object; with `safe_serialization` tensors by name.
            f: the path of a file, which is replaced as a whole or not at all; or an open file.
            safe_serialization: write safetensors, not a file of torch.save.

        Raises:
            ValueError: `safe_serialization` with an open file, or with what is no tensor.
        """
        checkpointing.plain.save(
            obj, f, self.project_configuration.save_on_each_node, safe_serialization, runtime=self._runtime
        )

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights to a folder, for `load_checkpoint_in_model`.

        Where each process holds a part of the weights, every process calls it, and all raise if one fails. Otherwise
        the main process may call it alone.

        A process that dies at any instant leaves the weights that were there before, or the new ones.

        Args:
            model: prepared or not.
            save_directory: the folder; weights that are there already are replaced.
            max_shard_size: bytes of a file at most, as a number or as in `5MB`; a larger tensor has a file alone.
            safe_serialization: safetensors; False uses torch.save.

        Raises:
            TypeError: `model` is no model.
            ValueError: `save_directory` is a file, a size is wrong, or weights are on the meta device (those that hooks
                bring for the forward alone are saved).
            CheckpointError: weights are sharded, and another process, which writes them, raised anything.
        """
        from ..big_modeling.state import get_state_dict_offloaded_model
        from ..hooks import has_offloaded_params

        require_model("save_model", model)
        checkpointing.shards.parse_size(max_shard_size)
        if any(map(has_offloaded_params, model.modules())):
            original = self._strategy.unwrap(model, keep_torch_compile=False)
            state: dict[str, Any] = get_state_dict_offloaded_model(original)
        else:
            state = self._strategy.state_dict(model)
        path = Path(save_directory).expanduser()
        error: Exception | None = None
        if self._writes_shared_files():
            try:
                checkpointing.shards.save_weights(state, path, max_shard_size, safe_serialization)
            except Exception as found:  # the other ranks may wait for the outcome
                error = found
        failed = self._exchange(error) if self._strategy.holds_part(model) else ""
        if error is not None:
            raise error
        if failed:
            raise CheckpointError(f"the weights were not saved to {path}: {failed}")
