"""Your own training loop: any optimizer over handle.trainable(); the base stays frozen. Saves and reloads the adapter."""

import tempfile
from pathlib import Path

import torch

import aarlib
from aarlib.aar import AARConfig

model, tokenizer = aarlib.load_model("nano", dtype="float32")
handle = aarlib.attach_aar(model, AARConfig(layers=(4, 5, 6, 7), window=20, views=("time",)), seed=0)
optimizer = torch.optim.AdamW([parameter for _, parameter in handle.trainable()], lr=3e-3)
texts = ["The river runs south, and the town lies on its eastern bank.", "Nine and six make fifteen, carry the one."]
batch = tokenizer(texts, return_tensors="pt", padding=True)
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


@torch.no_grad()
def show(what: str) -> None:
    print(f"{what}: CE {model(**batch, labels=labels).loss.item():.4f}")


show("untrained")
for _ in range(8):
    optimizer.zero_grad()
    model(**batch, labels=labels).loss.backward()
    optimizer.step()
show("trained")

with tempfile.TemporaryDirectory() as folder:
    path = aarlib.save_adapter(handle, Path(folder) / "adapter", metadata={"data": "two sentences"})
    handle.detach()
    show("detached")
    aarlib.load_adapter(model, path)
    show("reloaded")
