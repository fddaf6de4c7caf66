"""Look at what routers and attention did: windows, sinks and picks of a stock model, keyed by layer."""

import torch

import aarlib

model, tokenizer = aarlib.load_model("nano")
batch = tokenizer(
    ["The old harbour of the capital was built long before the river changed its course."], return_tensors="pt"
)

with torch.no_grad(), aarlib.record(model, windows=8, sink=True, dispatch=True) as rec:
    model(**batch)

print("layer  sink   weight on self  on the token before  experts picked most")
for layer, windows_BSM in rec.windows.items():
    expert_ids = rec.dispatch[layer].expert_ids
    top = torch.bincount(expert_ids.flatten(), minlength=model.config.num_experts).topk(3).indices.tolist()
    own, before = windows_BSM[..., -1].mean(), windows_BSM[..., -2].mean()
    print(f"{layer:5d}  {rec.sink[layer].mean():.3f}  {own:14.3f}  {before:19.3f}  {top}")
