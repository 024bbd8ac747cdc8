"""The parser on small schedules, written by hand in the form of libtpu's dump."""

import pytest

from experiments import tpu_schedule

UNITS = "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
SLOTS = "  2    2     4     2    1      3           3       2             2     2"

# A grid of 10 rounds with a loop over data inside; the constant of a round is set four bundles before.
LOOPS = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = smov 0 /* copy for cssa */ } /* entry bundle: %k.1 = custom-call(%a) */
   0x1 LB: > { %s7_s3 = sphi %s1_s0, %s2_s4 /* phi copy :: iteration index, stage = 0 */ } /* Start region 20 */
   0x2   : > { %9 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1 /*
base_bounds: (256, 4, 1)
second_minor_factor: 1 */ } /* Start region 5 :: End region 5 */
   0x3 LB: >> { %v3 = vld [vmem:[#allocation2] sm:$0xff] } /* Start region 30 */
   0x4   : >> { %vm1 = vmatmul.bf16 %v3  ;;  %31 = sbr.rel (!%p4_p2) target = $region30 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   : >> { %33 = vst [vmem:[#allocation9_spill] sm:$0xff] %v3 } /* End region 30 */
   0x9 PF: > { %s2_s4 = sadd.s32 1, %s7_s3 } /* Start/End empty region 31 */
   0xa   : > { %p6_p9 = scmp.ge.s32.totalorder %s2_s4, 10 /* loop exit test */ }
   0xb   : > { %35 = sbr.rel (!%p6_p9) target = $region20 }
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   :  {} /* End region 20 */
  0x10   :  { %40 = vsyncpa [#allocation3], 1 } /* exit bundle: %k.1 = custom-call(%a) */
"""

ALLOCATIONS = """\
$region0: #{k.1}
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'smem constant']
  #allocation1 [shape = 'u32[144,128]{1,0:T(1,128)}', space=vmem, size = 0x12000, scoped, tag = 'internal scratch']
    #allocation2 [shape = 'u8[524288]{0}', space=vmem, size = 0x80000, scoped, tag = 'input window']
  %s1 = inlined_call_operand.vmem [shape: s32[8], index: 0, kind: input]
"""


def use(bundles, **used):
    """The file of used slots; `used` gives rows by bundle, as `at_4="1 0 ..."`."""
    rows = [used.get(f"at_{i}", "0 0 0 0 0 0 0 0 0 1") for i in range(bundles)]
    return "\n".join(["== CAPACTIY:", UNITS, SLOTS, "== UTILIZATION:", *rows]) + "\n"


def bundles(*texts):
    """The file of bundles from what stands behind their numbers."""
    return "".join(f"{i:#6x} {text}\n" if i else f"     0 {text}\n" for i, text in enumerate(texts))


@pytest.fixture
def schedule():
    used = use(17, at_3="0 0 0 0 0 2 1 0 0 0", at_4="2 0 1 0 0 0 0 0 0 0", at_8="0 0 0 0 0 0 0 1 1 0")
    return tpu_schedule.parse("k.1", LOOPS, used, ALLOCATIONS)


def test_loops_their_bundles_and_constant_trips(schedule):
    assert [(r.name, r.parent, r.bundles, r.trips) for r in schedule.regions] == [
        ("", None, 2, None),
        ("1", "", 9, 10),
        ("1.1", "1", 6, None),
    ]
    assert [r.is_loop for r in schedule.regions] == [False, True, True]
    assert (schedule.bundles, schedule.vmem_bytes) == (17, 0x92000)


def test_cycles_are_bundles_times_rounds(schedule):
    assert schedule.executions({"1.1": 64}) == {"": 1, "1": 10, "1.1": 64}
    assert schedule.cycles({"1.1": 64}) == 2 + 10 * 9 + 64 * 6
    assert schedule.cycles({"1.1": 64, "1": 8}) == 2 + 8 * 9 + 64 * 6


def test_spills_and_use_by_region(schedule):
    assert [r.spills for r in schedule.regions] == [0, 0, 2] and schedule.spills == 2
    assert schedule.use(schedule.regions[2:])["MXU"] == pytest.approx(2 / (2 * 6))
    assert schedule.use(schedule.regions)["VLOAD"] == pytest.approx(2 / (3 * 17))


def test_what_depends_on_data_must_be_given(schedule):
    with pytest.raises(
        tpu_schedule.ScheduleError, match=r"loop 1.1 of k.1 are data and must be given.*1 \(9 bundles, 10"
    ):
        schedule.cycles({})
    with pytest.raises(tpu_schedule.ScheduleError, match=r"no loop 2; it has the kernel \(2 bundles\), 1 \(9"):
        schedule.cycles({"1.1": 3, "2": 1})


def test_a_part_that_a_branch_skips_is_a_region_if_it_is_large():
    skip = ":  { %1 = sbr.rel (%p1_p1) target = $region7 }"
    body = [":  {}"] * 4 + [":  { %2 = vadd }"] * 64 + ["PF:  { %3 = vsub } /* Start/End empty region 7 */"]
    small = [skip.replace("7", "8"), *body[:40], body[-1].replace("7", "8")]
    text = bundles(skip, *body, *small)
    found = tpu_schedule.parse("k.1", text, use(112), "")
    assert [(r.name, r.bundles) for r in found.regions] == [("", 48), ("b1", 64)]
    assert found.cycles({}) == 112
    assert found.cycles({"b1": 0.5, "b2": 7}) == 48 + 32


def test_a_loop_inside_of_a_skipped_part_runs_as_often():
    text = bundles(
        ":  { %1 = sbr.rel (%p1_p1) target = $region7 }",
        *[":  {}"] * 4,
        *[":  { %2 = vadd }"] * 64,
        ":  { %s1_s1 = smov (!%p1_p1), 2 }",
        "LB: > { %s3_s3 = sphi %s1_s1, %s4_s4 } /* Start region 9 */",
        ": > { %s4_s4 = sadd.s32 3, %s3_s3  ;;  %p2_p2 = scmp.ge.s32.totalorder %s4_s4, 10 /* loop exit test */ }",
        ": > { %5 = sbr.rel (!%p2_p2) target = $region9 }",
        *[":  {}"] * 4,
        "PF:  { %6 = vsub } /* Start/End empty region 7 */",
    )
    found = tpu_schedule.parse("k.1", text, use(78), "")
    assert [(r.name, r.parent, r.bundles, r.trips) for r in found.regions] == [
        ("", None, 6, None),
        ("b1", "", 65, None),
        ("1", "b1", 7, 3),
    ]
    assert found.cycles({"b1": 10}) == 6 + 10 * (65 + 3 * 7)


def test_on_a_chip_with_six_delay_slots_an_empty_bundle_stands_for_the_rest():
    head, jump = "LB: > { %1 = vadd } /* Start region 9 */", ": > { %5 = sbr.rel (!%p2_p2) target = $region9 }"
    short = bundles(head, jump, ": > { %6 = vst }", ":  {}", *[":  { %7 = vsub }"] * 6)
    full = bundles(head, jump, *[": > { %6 = vst }"] * 6, *[":  { %7 = vsub }"] * 2)
    assert tpu_schedule.parse("k.1", short, use(10), "", delay_slots=6).regions[1].bundles == 4
    assert tpu_schedule.parse("k.1", full, use(10), "", delay_slots=6).regions[1].bundles == 8
    assert tpu_schedule.parse("k.1", short, use(10), "").regions[1].bundles == 6


def test_another_form_is_refused():
    with pytest.raises(tpu_schedule.ScheduleError, match="k.1: 17 bundles, but the use of 16"):
        tpu_schedule.parse("k.1", LOOPS, use(16), "")
    with pytest.raises(tpu_schedule.ScheduleError, match="not numbered from 0 on"):
        tpu_schedule.parse("k.1", "nothing", use(0), "")
    with pytest.raises(tpu_schedule.ScheduleError, match=r"loops at bundles \[0\], but branches back to \[\]"):
        tpu_schedule.parse("k.1", bundles("LB: > { %1 = vadd }"), use(1), "")
    with pytest.raises(tpu_schedule.ScheduleError, match="another form than expected: 'MXU, ABC'"):
        tpu_schedule.parse("k.1", bundles(":  {}"), use(1).replace(UNITS, "MXU, ABC"), "")


def test_the_files_of_a_kernel_are_found_by_its_name(tmp_path):
    stages = {
        "71-final_bundles": LOOPS,
        "69-final_hlo-static-per-bundle-utilization": use(17),
        "50-pre-finalize-registers-and-allocations": ALLOCATIONS,
        "70-schedule-analysis_final_bundles": "",
    }
    for name in ("tree_attention.1", "copy", "copy.2", "TLP", "<late-finalization>"):
        for stage, text in stages.items():
            (tmp_path / f"1796-{name}-{stage}.txt").write_text(text)
    assert tpu_schedule.names(tmp_path) == ("copy", "copy.2", "tree_attention.1")
    assert tpu_schedule.read(tmp_path, "tree_attention").kernel == "tree_attention.1"
    assert tpu_schedule.read(tmp_path, "copy").kernel == "copy"
    with pytest.raises(tpu_schedule.ScheduleError, match="one kernel 'flash', found none among copy, copy.2, tree_at"):
        tpu_schedule.read(tmp_path, "flash")
