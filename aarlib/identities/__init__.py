"""Every golden identity as a function that returns its measured error; tests and `pipelines.doctor` both call it."""

from aarlib.identities.fdaa import FixedDispatch as FixedDispatch
from aarlib.identities.fdaa import attach_random_head as attach_random_head
from aarlib.identities.fdaa import fixed_dispatch as fixed_dispatch
from aarlib.identities.fdaa import head_bite as head_bite
from aarlib.identities.fdaa import randomise_head as randomise_head
from aarlib.identities.fdaa import step0_against_stock as step0_against_stock
from aarlib.identities.routing import Bite as Bite
from aarlib.identities.routing import batch_against_single as batch_against_single
from aarlib.identities.routing import bite as bite
from aarlib.identities.routing import default_attach as default_attach
from aarlib.identities.routing import disabled_is_stock as disabled_is_stock
from aarlib.identities.routing import eager_attention as eager_attention
from aarlib.identities.routing import eager_capture as eager_capture
from aarlib.identities.routing import error as error
from aarlib.identities.routing import expert_sum_against_block as expert_sum_against_block
from aarlib.identities.routing import gradients_against_eager as gradients_against_eager
from aarlib.identities.routing import logits_against_eager as logits_against_eager
from aarlib.identities.routing import materialised as materialised
from aarlib.identities.routing import packed_against_single as packed_against_single
from aarlib.identities.routing import prefill_against_decode as prefill_against_decode
from aarlib.identities.routing import randomise as randomise
from aarlib.identities.routing import relative_norm as relative_norm
from aarlib.identities.routing import selection_against_gate as selection_against_gate
from aarlib.identities.routing import stock_against_eager as stock_against_eager
from aarlib.identities.routing import windows_against_eager as windows_against_eager
