"""Attach attention-aware routers to a frozen model and generate: with alpha near 0 the stock text, then with random routers."""

import torch

import aarlib
from aarlib.aar import AARConfig

model, tokenizer = aarlib.load_model("nano")
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is 12 + 7?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)


def reply() -> str:
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


print("stock:    ", reply())
handle = aarlib.attach_aar(model, AARConfig(layers=(4, 5, 6, 7), window=20, init="closed"))
print("closed:   ", reply(), f"({handle.num_trainable:,} trainable values)")
handle.detach()
handle = aarlib.attach_aar(model, AARConfig(layers=(4, 5, 6, 7), window=20))
print("untrained:", reply())
handle.enabled = False
print("disabled: ", reply())
