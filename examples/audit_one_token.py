"""Is one token's weighting of its experts a good one? Every action's exact loss beside what the loss gradient predicts."""

import aarlib
from aarlib.audit import gradient_utilities, oracle

LAYER, SENTENCE = 5, "The old harbour of the capital was built long before the river changed its course."

model, tokenizer = aarlib.load_model("nano", dtype="float32")
input_ids = tokenizer([SENTENCE], return_tensors="pt")["input_ids"]
position = input_ids.shape[1] // 2

actions = oracle(model, input_ids, samples=[(0, position, LAYER)]).set_index("action")
utilities = gradient_utilities(model, input_ids, layers=[LAYER], positions=[(0, position)])[LAYER][0, position]
predicted = {f"vertex_{slot}": -value for slot, value in enumerate(utilities.tolist())}

print(
    f"{tokenizer.decode(input_ids[0, : position + 1])!r}, last token, layer {LAYER}; the loss is that of what follows"
)
print("action             CE   change  predicted by the gradient")
for action, row in actions.sort_values("ce").iterrows():
    shown = f"{predicted[action]:+.4f}" if action in predicted else ""
    print(f"{action:15} {row['ce']:.4f}  {row['delta_ce']:+.4f}  {shown}")
