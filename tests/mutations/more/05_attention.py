# ruff: noqa: F821
def check_nobody_reads_foreign_slots():
    """each request gets a number even if all slots but its own hold NaN"""
    world = make_batch([(9, 1), (30, 1), (3, 1)])
    lens = [req.device_len for req in world.reqs]
    world.pool.store_kv(*world.qkv[1:], world.batch.out_loc, 0)
    for plan in [
        PerRequestPlan([1] * len(lens), lens, world.table, torch.float32),
        GatheredDecodePlan(lens, world.table, torch.float32),
        SparseDecodePlan(lens, world.table, len(world.k_slots), 9, 3, torch.float32),
    ]:
        for row, length in enumerate(lens):
            own = world.table[row, :length].long()
            k, v = (torch.full_like(x, torch.nan) for x in (world.k_slots, world.v_slots))
            k[own], v[own] = world.k_slots[own], world.v_slots[own]
            out = plan.attend(world.qkv[0], k, v)[row]
            name = type(plan).__name__
            assert out.isfinite().all(), (
                f"{name}: request {row} read a foreign slot (0 * NaN is NaN)"
            )
