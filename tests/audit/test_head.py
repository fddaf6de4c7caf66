import math

import pytest
import torch

from aarlib.audit.head import AggregationHead, aggregate, kl_to_native, shares

T, K, D, E = 7, 4, 16, 8


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=generator)
    outputs = torch.randn(T, K, D, generator=generator)
    weights = torch.rand(T, K, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    return hidden, outputs, weights, ids


def lively(layers=(1, 3), **options):
    """A head whose last layer is random: its scores are of order 1."""
    head = AggregationHead(D, E, layers, **options)
    with torch.no_grad():
        head.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    return head


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        ((3, 7, 11, 15), {}, 301_313),
        ((15,), {}, 301_217),
        ((3, 7, 11, 15), {"projection_size": 128, "hidden_size": 512}, 810_113),
    ],
)
def test_parameter_counts_on_olmoe_are_the_papers(layers, options, expected):
    head = AggregationHead(2048, 64, layers, device="meta", **options)
    assert sum(parameter.numel() for parameter in head.parameters()) == expected


def test_scores_are_zero_before_training_and_depend_on_the_layer_after():
    hidden, outputs, weights, ids = draw()
    assert torch.equal(AggregationHead(D, E, (1, 3))(hidden, outputs, weights, ids, 3), torch.zeros(T, K))
    head = lively()
    first, second = (head(hidden, outputs, weights, ids, layer) for layer in (1, 3))
    assert (first - second).abs().max() > 1e-2
    assert first.std(dim=1).min() > 1e-2


def naive_score(tensors, hidden, outputs, weights, ids, layer, slot):
    """DESIGN 2.5 for one slot of one token, term by term; `tensors` by name in the head, `layer` its row of the embedding."""
    size = len(ids)
    a = tensors["project_hidden.weight"] @ hidden
    projected = [tensors["project_outputs.weight"] @ outputs[j] for j in range(size)]
    mean = sum(projected) / size
    b = projected[slot]
    mass = sum(float(weights[j]) for j in range(size))
    p = float(weights[slot]) / mass
    features = [
        *a, *b, *(x * y for x, y in zip(a, b, strict=True)), *(b - mean), *tensors["expert_embedding.weight"][ids[slot]],
        *tensors["layer_embedding.weight"][layer], torch.tensor(p), torch.tensor(math.log(p)), torch.tensor(mass),
    ]  # fmt: skip
    mixed = tensors["mix.weight"] @ torch.stack([value.double() for value in features]) + tensors["mix.bias"]
    activated = torch.tensor([0.5 * float(x) * (1 + math.erf(float(x) / math.sqrt(2))) for x in mixed])
    return float(tensors["score.weight"][0] @ activated.double() + tensors["score.bias"][0])


@pytest.mark.parametrize("sizes", [(64, 128), (128, 512)], ids=["301,313", "810,113"])
def test_scores_are_the_formula_of_a_loop_over_tokens_and_slots(sizes):
    head = lively(layers=(1, 3), projection_size=sizes[0], hidden_size=sizes[1], seed=5)
    with torch.no_grad():
        head.score.bias.fill_(0.3)
    tensors = {name: tensor.detach().double() for name, tensor in head.named_parameters()}
    hidden, outputs, weights, ids = draw(seed=4)
    arguments = (hidden.double(), outputs.double(), weights, ids.tolist())
    expected = torch.tensor(
        [[naive_score(tensors, *(part[t] for part in arguments), 1, slot) for slot in range(K)] for t in range(T)]
    )
    found = head(hidden, outputs, weights, ids, 3).detach()
    assert expected.std() > 0.1
    assert float((found - expected).abs().max() / expected.abs().max().clamp_min(1)) < 1e-6


def test_permuting_the_slots_permutes_the_scores():
    hidden, outputs, weights, ids = draw()
    head, order = lively(), torch.tensor([2, 0, 3, 1])
    scores = head(hidden, outputs, weights, ids, 1)
    permuted = head(hidden, outputs[:, order], weights[:, order], ids[:, order], 1)
    assert (scores[:, order] - scores).abs().max() > 1e-2
    torch.testing.assert_close(permuted, scores[:, order], atol=1e-6, rtol=0)


def test_one_seed_gives_one_head_and_another_seed_another():
    first, same, other = (AggregationHead(D, E, (1,), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.mix.weight, same.mix.weight)
    assert not torch.equal(first.mix.weight, other.mix.weight)


@pytest.mark.parametrize(("masked", "blind_to"), [(("hidden",), 0), (("outputs",), 1), (("hidden", "outputs"), 0)])
def test_masked_features_are_not_seen(masked, blind_to):
    inputs, head = list(draw()), lively()
    before = head(*inputs, 1, masked=masked)
    assert not torch.equal(before, head(*inputs, 1))
    inputs[blind_to] = inputs[blind_to] + 1
    assert torch.equal(head(*inputs, 1, masked=masked), before)
    assert not torch.equal(head(*inputs, 1), head(*draw(), 1))


def test_a_context_vector_changes_the_scores():
    inputs, head = draw(), lively(context_size=5)
    context = torch.randn(T, 5, generator=torch.Generator().manual_seed(2))
    assert (head(*inputs, 1, context=context) - head(*inputs, 1, context=-context)).abs().max() > 1e-2


def test_aggregation_keeps_mass_and_is_native_at_zero_scores():
    _, _, weights, _ = draw()
    scores = torch.randn(T, K, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(aggregate(weights, torch.zeros(T, K)), weights, atol=1e-6, rtol=0)
    moved = aggregate(weights, scores)
    assert (moved - weights).abs().max() > 1e-2
    torch.testing.assert_close(moved.sum(1), weights.sum(1), atol=1e-6, rtol=0)
    p = weights / weights.sum(1, keepdim=True)
    q = p * scores.exp() / (p * scores.exp()).sum(1, keepdim=True)
    torch.testing.assert_close(moved / weights.sum(1, keepdim=True), q, atol=1e-6, rtol=0)


def test_kl_equals_its_definition_and_ignores_a_constant():
    _, _, weights, _ = draw()
    scores = torch.randn(T, K, generator=torch.Generator().manual_seed(3))
    mass = weights.sum(1, keepdim=True)
    p, q = weights / mass, aggregate(weights, scores) / mass
    torch.testing.assert_close(kl_to_native(weights, scores), (q * (q / p).log()).sum(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(kl_to_native(weights, torch.full((T, K), 2.0)), torch.zeros(T), atol=1e-6, rtol=0)


def test_a_weight_of_zero_gives_finite_scores_and_gradients():
    hidden, outputs, weights, ids = draw()
    weights[0, 1], weights[1] = 0.0, 0.0
    head = lively()
    scores = head(hidden, outputs, weights, ids, 1)
    (aggregate(weights, scores).sum() + kl_to_native(weights, scores).sum()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())
    assert torch.isfinite(shares(weights).log_p).all()
