"""Reading of optimised HLO, on a short module in the compiler's form."""

import pytest

from experiments import tpu_hlo

MODULE = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

%fused_slice (param_0.1: bf16[4,8,128], param_1.1: s32[]) -> bf16[8,128] {
  %param_0.1 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = s32[]{:T(128)} parameter(1)
  %dynamic_slice.7 = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0.1, %param_1.1)
  ROOT %bitcast.8 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} bitcast(%dynamic_slice.7)
}

%fused_update (param_0.2: bf16[4,8,128], param_1.2: bf16[1,8,128], param_2.2: s32[]) -> (s32[], bf16[4,8,128]) {
  %param_0.2 = bf16[4,8,128]{2,1,0} parameter(0)
  %param_1.2 = bf16[1,8,128]{2,1,0} parameter(1)
  %param_2.2 = s32[] parameter(2)
  %update.1 = bf16[4,8,128]{2,1,0} dynamic-update-slice(%param_0.2, %param_1.2, %param_2.2)
  ROOT %tuple.3 = (s32[], bf16[4,8,128]{2,1,0}) tuple(%param_2.2, %update.1)
}

%fused_reduce (param_0.3: bf16[4,8,128]) -> bf16[] {
  %param_0.3 = bf16[4,8,128]{2,1,0} parameter(0)
  %copy.9 = bf16[4,8,128]{2,1,0} copy(%param_0.3)
  ROOT %reduce.1 = bf16[] reduce(%copy.9), to_apply=%add
}

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%branch (arg.1: bf16[4,8,128]) -> bf16[4,8,128] {
  %arg.1 = bf16[4,8,128]{2,1,0} parameter(0)
  ROOT %copy.5 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} copy(%arg.1), metadata={op_name="jit(f)/while" stack_frame_id=7}
}

%body (arg.2: (s32[], /*index=1*/bf16[4,8,128])) -> (s32[], bf16[4,8,128]) {
  %arg.2 = (s32[], /*index=1*/bf16[4,8,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%arg.2), index=0
  %kv = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg.2), index=1
  %slice_fusion = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%kv, %i), kind=kLoop, calls=%fused_slice
  %reduce_fusion = bf16[]{:T(256)} fusion(%kv), kind=kLoop, calls=%fused_reduce
  %copy-start.1 = (bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[4,8,128]{2,1,0:T(8,128)(2,1)}, u32[]) copy-start(%kv)
  %copy-done.1 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %conditional.1 = bf16[4,8,128]{2,1,0} conditional(%i, %kv, %kv), branch_computations={%branch, %branch}
  %callback.6 = (f32[]{:T(128)}, u32[], token[]) send(%i, %token), channel_id=1, is_host_transfer=true
  %copy.1 = s32[]{:T(128)} copy(%i)
  ROOT %update_fusion = (s32[], bf16[4,8,128]{2,1,0}) fusion(%conditional.1, %slice_fusion, %i), calls=%fused_update
}

%condition (arg.3: (s32[], bf16[4,8,128])) -> pred[] {
  %arg.3 = (s32[], bf16[4,8,128]{2,1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

ENTRY %main.2 (kv.1: bf16[4,8,128]) -> bf16[4,8,128] {
  %kv.1 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} parameter(0), sharding={replicated}
  %copy.2 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} copy(%kv.1)
  %to_host = (bf16[4,8,128]{2,1,0:T(8,128)S(5)}, bf16[4,8,128]{2,1,0}, u32[]{:S(2)}) copy-start(%kv.1)
  %callback.9 = f32[] custom-call(%kv.1), custom_call_target="xla_python_callback"
  %while.1 = (s32[], bf16[4,8,128]{2,1,0}) while(%tuple.1), condition=%condition, body=%body
  ROOT %result = bf16[4,8,128]{2,1,0} get-tuple-element(%while.1), index=1
}
"""

WHOLE, LAYER = 2 * 4 * 8 * 128, 2 * 8 * 128


def test_copies_in_loops_are_seen_through_fusions_and_branches():
    found = {(c.name, c.opcode, c.bytes, c.into) for c in tpu_hlo.copies_in_loops(MODULE, LAYER)}
    assert found == {
        ("copy-start.1", "copy-start", WHOLE, "VMEM"),
        ("copy.5", "copy", WHOLE, "HBM"),
        ("slice_fusion", "dynamic-slice", LAYER, "VMEM"),
        ("update_fusion", "dynamic-update-slice", LAYER, "HBM"),
    }


def test_only_copies_of_the_given_size_count():
    found = tpu_hlo.copies_in_loops(MODULE, WHOLE)
    assert {c.name for c in found} == {"copy-start.1", "copy.5"} and len(found) == 2
    assert {(c.dtype, c.sizes) for c in found} == {("bf16", (4, 8, 128))}
    assert tpu_hlo.copies_in_loops(MODULE, WHOLE + 1) == ()


def test_transfers_to_the_host():
    assert set(tpu_hlo.host_transfers(MODULE)) == {
        "send callback.6",
        "copy-start to_host",
        "xla_python_callback callback.9",
    }


@pytest.mark.parametrize(("dtype", "bytes"), [("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("bf16", 12), ("token", 0)])
def test_bytes_of_an_array(dtype, bytes):
    assert tpu_hlo.Array(dtype, (2, 3), 0).bytes == bytes


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no HLO text"):
        tpu_hlo.parse("hello")
