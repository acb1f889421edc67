"""The benchmark of gdsstream: `python -m bench.run`.

One run measures several loaders on one set of files. Each round samples a physical ceiling and then runs every loader
once, in rotating order, so that drift of the machine hits all alike; a loader's share of the ceiling is the median of
the ratios within the rounds. Every file states its own rules in its docstring:

    run.py           the Hydra application; run_parts.py makes a run, part by part
    guard.py         the process that measures, watched by another (guarded.py is its beginning)
    resume.py        what an interrupted run has already measured
    busy.py          refuses a GPU that others use; nvml.py asks the driver
    progress.py      the bar with the time left
    config.py        the configuration, checked, with the nearest valid name in each error; config_base.py has what all
                     scenarios share, config_transfer.py, config_mlperf.py and config_checkpoint.py those of theirs
    reference/       the tables of other documents, made here and laid beside theirs
    files.py         the test checkpoint: written, known byte for byte, removed
    record_shards.py the test dataset: shards of numbered records, known byte for byte
    measure.py       rounds, timed regions, failures as rows
    ceilings.py      what the hardware gives without any loader; ceilings_transfer.py: for transfers,
                     ceilings_write.py: of checkpoints, ceilings_disk.py: of cold files; ceilings_best.py chooses
    aio.py           kernel AIO: for ceilings, and as a route
    transfer_ops.py  which ios a sample of transfers makes (pure); transfer_memory.py: where they land, byte for byte
    gdsio_jobs.py    job files of gdsio (pure); gdsio_run.py makes runs of them, gdsio_at_once.py measures them all at
                     the same time (gate.py), gdsio_line.py prints results like it
    cufile_files.py  files and memory registered with cuFile, through cuda.bindings
    io_memory.py     memory that ios land in
    cache.py         warm and cold page cache, verified with mincore
    device_bytes.py  what disks and the GPU's link count beside each sample
    stats.py         median, MAD, IQR, exact interval of a median (pure)
    environment.py   what the numbers were taken on; hardware.py: the drives, links and NUMA nodes
    record.py        the JSON line of one loader, and its validator; record_schema.json is its JSON schema
    results.py       records read back, and which of them belong into one table
    report.py        the tables in the terminal, in the form of table.py; report_layers.py has those of streamed layers,
                     report_epoch.py those of data loaders, report_transfer.py those of transfers, peers.py the ratio to
                     the best other library
    report_bounds.py intervals, or ranges where samples are too few for one
    report_md.py     `python -m bench.report`: the same tables and plots/ in a report.md; sweeps.py finds what was
                     swept, sweeps_best.py names the fastest of it
    compare.py       `python -m bench.compare`: is one run faster than another; compare_output.py prints it
    moe.py model.py  what the layer scenarios compute: a layer without allocation, and a model to train
    slope.py         overhead a layer and fill of a pipeline (pure)
    clock.py         marks on a device's stream
    loaders/         one file a library; the rules of the timed region are in loaders/base.py
    reference/       the reference documents' tables, measured here, and which of their claims hold
    scenarios/       the verbs: what a sample delivers and how it is verified

Importing this package imports neither torch nor any loader.
"""
