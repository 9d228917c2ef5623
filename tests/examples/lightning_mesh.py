"""A program that Lightning runs with model parallelism: DATASET CHECKPOINT TENSOR_PARALLEL."""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from energon import WorkerConfig, get_savable_loader, get_train_dataset


class Batches:
    """The batches of a loader; its state is kept by `Data`."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)


class Data(lightning.LightningDataModule):
    saved = None

    def train_dataloader(self):
        config = WorkerConfig.from_mesh(
            self.trainer.strategy.device_mesh,
            data_dims=("data_parallel",),
            num_workers=1,
            lanes=4,
        )
        dataset = get_train_dataset(
            sys.argv[1], worker_config=config, batch_size=2, virtual_epoch_length=20
        )
        self.loader = get_savable_loader(dataset)
        if self.saved is not None:
            self.loader.restore_state_global(self.saved)
        return Batches(self.loader)

    def state_dict(self):
        return {"train": self.loader.save_state_global()}

    def load_state_dict(self, state):
        self.saved = state["train"]


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 2)
        self.keys = []

    def configure_model(self):
        whole = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self.layer, self.device_mesh["tensor_parallel"], whole)

    def training_step(self, batch, index):
        self.keys += batch.__key__
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


checkpoint, tensor = Path(sys.argv[2]), int(sys.argv[3])
ranks = int(os.environ["WORLD_SIZE"])
resumed = checkpoint.exists()
model = Model()
trainer = lightning.Trainer(
    max_steps=6 if resumed else 3,
    accelerator="cpu",
    devices=ranks,
    strategy=ModelParallelStrategy(
        data_parallel_size=ranks // tensor,
        tensor_parallel_size=tensor,
        save_distributed_checkpoint=False,
    ),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(model, datamodule=Data(), ckpt_path=str(checkpoint) if resumed else None)
if not resumed:
    trainer.save_checkpoint(checkpoint)
print("keys", trainer.global_rank, *model.keys)
