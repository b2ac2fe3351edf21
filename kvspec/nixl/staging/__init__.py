"""Move transfers of many short runs through staging buffers: registered memory of this rank.

Invariant: a slot belongs to one transfer from before its handle is posted until no byte of the
handle can move any more. A transfer in quarantine keeps its slots. A staged transfer writes exactly
the bytes of the direct transfer. The other bytes of a range stay in the buffer.

How it works:
    Each posted descriptor costs the transport time. So a staged read posts a few long ranges of the
    peer instead of many short runs, and then permutes the bytes of the runs into place. That is
    faster if posting takes longer than permuting. `Staging.saves` decides with one number: a
    descriptor costs as much time as permuting `stage_below` bytes. For example, `stage_below` is
    6 KiB, and 16 MiB move from 64 ranges. In runs of 2 KiB, these are 8,192 descriptors. Staging
    spares 8,128 of them. Minus 96 for the search, they cost as much as permuting 47 MiB: staging is
    faster. In runs of 8 KiB, the spared descriptors cost as much as permuting 11 MiB: staging is
    slower.

    The number differs from machine to machine, so a rank learns it from its first transfers
    (`Learner`). Transfers for which both ways may be the faster one take turns until three of each
    way are done:

        from          time of                     16 MiB in runs of 8 KiB
        a staged one  reading one byte            2.1 ms / 16 MiB
                      permuting one byte          3.9 ms / 16 MiB
        a direct one  posting one descriptor      (7.8 ms - 2.1 ms) / 2,048 = 2.8 us

    Here a descriptor costs as much as permuting 12 KiB. Only the rank that starts a transfer stages
    it, so its peers need not know the number.

    A buffer is divided into slots of equal size. Each handle of a staged transfer uses one slot. A
    transfer that finds no free slot draws a number and waits. Free slots go to the waiting
    transfers in the order of their numbers. For example, three transfers share two slots:

        transfer    number    slots
        A           -         0, 1
        B           7         -
        C           8         -

    The handle in slot 0 ends. C is polled first, but B is ahead of C and only one slot is free: C
    waits. Then B is polled and receives slot 0.

    A transfer makes progress only when it is polled, and its owner may have stopped polling it. So
    polling C also polls B and then A, until a handle of one of them ends
    (`InFlightTransfers.poll_others`).

    A transfer calls this folder at three places:

        when it is created    `Buffers.choose` decides whether it is staged: `StagedRanges`
        before each handle    `free_slot` finds a slot, and `moved_runs` returns the descriptors
        after each handle     `land` copies the runs into their places
"""
