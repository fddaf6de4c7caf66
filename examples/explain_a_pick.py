"""Why did the router pick this expert for this token? The components that made its score, and what each does to the ranking."""

import aarlib
from aarlib.lens import aarv, decompose

LAYER, SENTENCE = 5, "The old harbour of the capital was built long before the river changed its course."

model, tokenizer = aarlib.load_model("nano")
input_ids = tokenizer([SENTENCE], return_tensors="pt")["input_ids"]
position = input_ids.shape[1] // 2

parts = decompose(model, input_ids, receivers=[LAYER], by="head")
logits = parts.logits(LAYER)[0, position]
expert = int(logits.argmax())
scores = {name: parts.scores(LAYER, name)[0, position] for name in parts.components(LAYER)}
token = tokenizer.decode(input_ids[0, position])
print(
    f"token {token!r}, layer {LAYER}: expert {expert} with logit {logits[expert]:.3f}, closure {parts.closure_error:.0e}"
)
print(f"sum of {len(scores)} components: {sum(score[expert] for score in scores.values()):.3f}")

print("component        score  above the mean expert  AARV: ranks moved without it, all tokens")
margin = {name: float(score[expert] - score.mean()) for name, score in scores.items()}
for name in sorted(margin, key=margin.__getitem__, reverse=True)[:8]:
    print(f"{name:14}  {scores[name][expert]:+.3f}  {margin[name]:+21.3f}  {aarv(parts, LAYER, name):.2f}")
