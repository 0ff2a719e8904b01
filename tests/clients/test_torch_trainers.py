"""Checkpoints by the frameworks' own callbacks, in a slot with `write = "back"`: grouped, durable, and gone on from.

Lightning writes to s3:// by itself, through fsspec. Hugging Face's Trainer writes to a directory, which a callback
takes to the bucket, as its users do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.filesystems import closed
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY
from tests.clients.saving import BUCKET, Saving, saving
from tests.support.gateway_process import ANSWER_SECONDS_MAX
from tests.support.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saving]:
    with saving(tmp_path_factory.mktemp("trainers") / "cache") as one:
        yield one


@pytest.fixture
def filesystem(monkeypatch: pytest.MonkeyPatch, saved: Saving) -> Iterator[Any]:
    """The one that fsspec gives for s3://, too."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", saved.gateway.s3_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", saved.gateway.s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    s3fs.S3FileSystem.clear_instance_cache()
    with closed(s3fs.S3FileSystem()) as made:
        yield made
    s3fs.S3FileSystem.clear_instance_cache()


def checkpoints(saved: Saving, prefix: str) -> dict[str, dict[str, Any]]:
    """Prefix → a checkpoint, as the gateway shows it."""
    query = {"prefix": f"s3://{BUCKET}/{prefix}"}
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        page = client.get(f"{saved.gateway.admin_url}/api/v1/checkpoints", params=query).raise_for_status().json()
    return {one["prefix"]: one for one in page["checkpoints"]}


def all_are_durable(saved: Saving, prefix: str) -> bool:
    return {one["state"] for one in checkpoints(saved, prefix).values()} == {"durable"}


def test_lightning_saves_by_itself_and_goes_on(saved: Saving, filesystem: Any) -> None:
    """`ModelCheckpoint` with `save_last`: each epoch's object is a checkpoint, `last.ckpt` is none, what is not among
    the best is deleted; `fit` goes on from s3://."""
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, _number: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    def trained(epochs: int, resumed: str | None = None) -> tuple[Any, Any]:
        module, data = Module(), torch.utils.data.DataLoader(torch.ones(8, 64), batch_size=4)
        keeping = ModelCheckpoint(f"s3://{BUCKET}/lightning", save_top_k=2, monitor="epoch", mode="max", save_last=True)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            callbacks=[keeping],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data, ckpt_path=resumed, weights_only=False)
        return module, trainer

    module, _ = trained(3)
    keys = saved.arrived("lightning/")
    steps = [f"lightning/epoch={epoch}-step={2 * (epoch + 1)}.ckpt" for epoch in (1, 2)]
    assert sorted(keys) == [*steps, "lightning/last.ckpt"]
    eventually(lambda: all_are_durable(saved, "lightning/"))
    found = checkpoints(saved, "lightning/")
    assert [(key, one["layout"], one["files"]) for key, one in found.items()] == [
        (key, "lightning", 1) for key in steps
    ]
    with filesystem.open(f"{BUCKET}/{steps[-1]}", "rb") as file:
        state = torch.load(file, weights_only=False)["state_dict"]
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    _, trainer = trained(4, f"s3://{BUCKET}/lightning/last.ckpt")
    assert (trainer.current_epoch, trainer.global_step) == (4, 8)


def test_the_trainer_saves_in_steps_and_goes_on(saved: Saving, filesystem: Any, tmp_path: Path) -> None:
    """Each directory `checkpoint-N` is one checkpoint with all its files; got back, training goes on from it."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Uploading(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            name = f"checkpoint-{state.global_step}"
            filesystem.put(f"{args.output_dir}/{name}/", f"{BUCKET}/trainer/{name}/", recursive=True)

    def trainer(directory: Path, steps: int) -> Any:
        torch.manual_seed(1)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=1, n_head=2))
        arguments = TrainingArguments(
            str(directory), max_steps=steps, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
        )
        data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
        return Trainer(model, arguments, train_dataset=data, callbacks=[Uploading()])

    trainer(tmp_path / "first", 4).train()
    keys = saved.arrived("trainer/")
    eventually(lambda: all_are_durable(saved, "trainer/"))
    found = checkpoints(saved, "trainer/")
    assert [(key, one["layout"]) for key, one in found.items()] == [
        (f"trainer/checkpoint-{step}/", "huggingface") for step in (2, 4)
    ]
    for prefix, one in found.items():
        files = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
        assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"} <= files
        assert one["files"] == len(files)
    back = tmp_path / "back" / "checkpoint-4"
    filesystem.get(f"{BUCKET}/trainer/checkpoint-4/", f"{back}/", recursive=True)
    before = tmp_path / "first" / "checkpoint-4"
    names = sorted(path.name for path in before.iterdir())
    assert [(back / name).read_bytes() for name in names] == [(before / name).read_bytes() for name in names]
    going_on = trainer(tmp_path / "second", 6)
    going_on.train(resume_from_checkpoint=str(back))
    assert going_on.state.global_step == 6
    restore = checkpoints(saved, "trainer/checkpoint-4/")["trainer/checkpoint-4/"]["restore"]
    assert (restore["files_begun"], restore["files_behind"], restore["bytes_read"]) == (len(names), 0, restore["bytes"])
