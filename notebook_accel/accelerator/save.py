"""The accelerator's checkpoints."""

from __future__ import annotations

import functools
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..big_modeling.state import get_state_dict_offloaded_model
from ..checkpointing import agreement, folder, gather, names, plain, read, shards, together, write
from ..checkpointing.background import Writer
from ..checkpointing.project import PathLike, ProjectConfiguration
from ..errors import CheckpointError
from ..hooks import has_offloaded_params
from .base import Shared


class SavePart(Shared):
    """Save and load all that was prepared or registered, as a whole or not at all."""

    _custom_objects: list[Any]
    _save_hooks: dict[int, Callable[..., None]]
    _load_hooks: dict[int, Callable[..., None]]
    _writer: Writer
    project_configuration: ProjectConfiguration

    def _init_saving(self, config: ProjectConfiguration | None, project_dir: PathLike | None) -> None:
        if config is not None and not isinstance(config, ProjectConfiguration):
            raise TypeError(f"project_config is a {type(config).__name__}, not a ProjectConfiguration")
        self.project_configuration = config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self._custom_objects = []
        # handles refer to them weakly, which a dict does not allow
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._writer = Writer()

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
        """Save and load these objects too; ValueError names those without `state_dict` and `load_state_dict`."""
        wrong = [
            item
            for item in objects
            if not callable(getattr(item, "state_dict", None))
            or not callable(getattr(item, "load_state_dict", None))
        ]
        if wrong:
            listed = ", ".join(f"{type(item).__name__} {item!r}" for item in wrong)
            raise ValueError(
                f"objects to register need state_dict and load_state_dict, these lack one: {listed}"
            )
        self._custom_objects += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every rank before models are saved.

        What it takes out of `weights` is not saved; `output_dir` is the folder that becomes the checkpoint, and
        files it writes there belong to it. The handle's `remove` ends it.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before models are loaded; what it takes out of `models` is not loaded."""
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
        the checkpoint that was there before. Other files in the folder stay.

        Args:
            output_dir: the folder; with automatic naming it is `project_dir/checkpoints/checkpoint_N` instead.
            safe_serialization: weights as safetensors; False uses torch.save.
            async_save: copy all tensors, return, and write in a thread. The next save or load, `end_training` and
                the end of the process wait for it; its error is raised there.
            save_model_func_kwargs: arguments of DeepSpeed's `save_checkpoint`; not supported, each is an error.

        Returns:
            The folder.

        Raises:
            ValueError: no folder, or one that cannot be a checkpoint.
            CheckpointError: on all processes, if one could not write; the old checkpoint is untouched.
        """
        if save_model_func_kwargs:
            raise ValueError(f"save_state does not know {', '.join(save_model_func_kwargs)}: leave it out")
        self._writer.wait()
        target, keep = self._save_target(output_dir)
        meet: agreement.Agreement = agreement.ByCollectives(self._runtime.comm)
        topology = self._runtime.topology
        write.start(target, topology, meet)
        error = None
        files: list[write.File] = []
        shared: list[together.Together] = []
        try:
            files, shared = self._files_to_save(folder.saving(target), safe_serialization)
        except Exception as found:  # the other ranks wait to hear of it
            error = found
        self._require_all(error, target)
        if async_save:
            files, shared = self._snapshot(files, shared, target)
        plan = write.Plan(
            target=target,
            files=files,
            together=functools.partial(together.write_all, shared),
            topology=topology,
            facts={"world_size": topology.world_size, "step": self.step},
            keep=keep,
        )
        if async_save:
            meet = agreement.ByFiles(self._meeting_place(target), topology.rank, topology.world_size)
            self._writer.start(lambda: write.finish(plan, meet), target.name)
        else:
            write.finish(plan, meet)
        self.project_configuration.iteration += 1
        return target

    def _snapshot(
        self, files: list[write.File], shared: list[together.Together], target: Path
    ) -> tuple[list[write.File], list[together.Together]]:
        """Return what is to be written with contents that training does not change any more."""
        error = None
        try:
            shared = [part.snapshot(self._writer.copies) for part in shared]
            files = write.snapshot(files, self._writer.copies)
        except Exception as found:  # the other ranks wait to hear of it
            error = found
        self._require_all(error, target)
        return files, shared

    def _require_all(self, error: Exception | None, target: Path) -> None:
        """Raise this rank's error, or tell of another rank's, with nothing left of the new checkpoint."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        errors = self._runtime.comm.all_gather_object(text)
        if not any(errors):
            return
        if self._runtime.topology.is_local_main:
            folder.remove(folder.saving(target))
        if error is not None:
            raise error
        found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
        raise CheckpointError(
            f"checkpoint {target} was not written, what was there before is untouched: {found}"
        )

    def _save_target(self, output_dir: PathLike | None) -> tuple[Path, int | None]:
        config = self.project_configuration
        if not config.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or a ProjectConfiguration with automatic naming"
                )
            target = folder.resolve(output_dir)
            folder.check(target)
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

    def _meeting_place(self, target: Path) -> Path:
        token = self._runtime.comm.broadcast_object(uuid.uuid4().hex[:8])
        return folder.meeting(target, token)

    def _parts(self, models: list[torch.nn.Module]) -> read.Parts:
        return read.Parts(
            models=models,
            owners=[self._strategy.unwrap(model, keep_torch_compile=False) for model in self._models],
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            scaler=self._precision.scaler,
            custom=self._custom_objects,
        )

    def _files_to_save(
        self, where: Path, safe_serialization: bool
    ) -> tuple[list[write.File], list[together.Together]]:
        models = [self._strategy.unwrap(model) for model in self._models]
        is_shared = self._strategy.saves_together
        # first what all ranks gather together: a hook, or a registered object, may fail on one of them
        weights = [self._strategy.weights(model) for model in self._models]
        states = [] if is_shared else [self._strategy.optimizer_state(item) for item in self._optimizers]
        for hook in list(self._save_hooks.values()):
            hook(models, weights, str(where))
        topology = self._runtime.topology
        parts = self._parts(self._models)
        files = gather.own_files(parts, topology.rank, self.step)
        shared = self._strategy.together(parts, weights)
        each_node = self.project_configuration.save_on_each_node
        if topology.is_local_main if each_node else topology.is_main:
            files += [] if is_shared else gather.model_files(weights, safe_serialization)
            files += gather.optimizer_files(states)
            files += gather.shared_files(parts)
        return files, shared

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
        on after the batch they were at. Others do so through `skip_first_batches(loader, n)`, in the order of that
        epoch; an iteration without it starts a new one.

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
        self._writer.wait()
        source = self._load_source(input_dir)
        if source is None:
            return False
        target, number = source
        options = {key: value for key, value in load_model_func_kwargs.items() if key != "map_location"}
        models = [self._strategy.unwrap(model) for model in self._models]
        error: Exception | None = None
        loading = read.Loading()
        try:
            for hook in list(self._load_hooks.values()):
                hook(models, str(target))
            loading = read.plan(
                target,
                self._parts([self._strategy.unwrap(model, keep_torch_compile=False) for model in models]),
                self._runtime.topology.rank,
                self._runtime.topology.world_size,
                count_models=not self._load_hooks,
                options=load_kwargs or {},
                model_options=options,
                load_together=self._strategy.load_together,
            )
        except Exception as found:  # the other ranks wait to hear of it
            error = found
        errors = self._runtime.comm.all_gather_object(None if error is None else str(error))
        if error is not None:
            raise error
        if any(errors):
            found_on = next(rank for rank, text in enumerate(errors) if text)
            raise CheckpointError(f"rank {found_on} cannot load {target}: {errors[found_on]}")
        loading.run()
        if loading.step is not None:
            self.step = loading.step
        if number is not None:
            self.project_configuration.iteration = max(self.project_configuration.iteration, number + 1)
        return True

    def _load_source(self, input_dir: PathLike | None) -> tuple[Path, int | None] | None:
        """Return the folder and its number, where it has one; None where the latest is asked for and there is none."""
        automatic = self.project_configuration.automatic_checkpoint_naming
        if input_dir is None and not automatic:
            raise ValueError("load_state needs input_dir, or a ProjectConfiguration with automatic naming")
        if automatic and (input_dir is None or os.fspath(input_dir) == "latest"):
            found = self._runtime.comm.broadcast_object(names.checkpoints(self._checkpoints()))
            if not found and input_dir is not None:
                return None
            if not found:
                raise ValueError(f"{self._checkpoints()} holds no checkpoint to load")
            number, target = found[-1]
            return target, number
        assert input_dir is not None
        target = folder.resolve(input_dir)
        if self._runtime.topology.is_local_main:
            folder.recover(target)
        self._runtime.comm.barrier()
        if not target.is_dir():
            raise ValueError(f"{target} is no folder with a checkpoint")
        return target, None

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object in rank 0 only, or once on each node where the project is configured so."""
        plain.save(
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

        Args:
            model: prepared or not.
            save_directory: the folder; weights that are there already are replaced.
            max_shard_size: bytes of a file at most, as a number or as in `5MB`; a larger tensor has a file alone.
            safe_serialization: safetensors; False uses torch.save.

        Raises:
            ValueError: `save_directory` is a file, a size is wrong, or weights are on the meta device (those that hooks
                bring for the forward alone are saved).
        """
        shards.parse_size(max_shard_size)
        if any(map(has_offloaded_params, model.modules())):
            original = self._strategy.unwrap(model, keep_torch_compile=False)
            state: dict[str, Any] = get_state_dict_offloaded_model(original)
        else:
            state = self._strategy.state_dict(model)
        topology = self._runtime.topology
        each_node = self.project_configuration.save_on_each_node
        if topology.is_local_main if each_node else topology.is_main:
            path = Path(save_directory).expanduser()
            shards.save_weights(state, path, max_shard_size, safe_serialization)
