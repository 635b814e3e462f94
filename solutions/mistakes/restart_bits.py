from dtlab.grading.mistakes import Mistake

RANDOM = '        torch.set_rng_state(saved["random"])\n'
ORDER = "order[place * job.batch:(place + 1) * job.batch]"
RESTORED = "        for name, part in parts.items():\n"

HINTS = {
    "never killed": "Without a kill this is a plain loop: epoch e in the order of its own "
        "generator, batch by batch, until job.steps steps are taken.",
    **dict.fromkeys(("first epoch", "later epochs", "killed again"), "Other bits: something that "
        "the next step depends on is not what it was: weights, the momentum, the learning rate, "
        "the place in the epoch and its order, or the random numbers of the dropout. More steps: "
        "save after each job.every of them, and begin at the one that was saved. Saved in between: "
        "save only then. Ended by itself: go on until job.steps steps are taken."),
    "nothing saved": "Without a checkpoint on the disk the training begins anew, as the first "
        "process did.",
}

MISTAKES = [
    Mistake({RANDOM: ""}, "The random numbers were not restored: dropout draws other masks than "
            "in a training that was never killed. Save torch.get_rng_state(), set it again."),
    Mistake({RANDOM: "        torch.manual_seed(job.seed + step)\n"}, "A new seed is not the old "
            "state: dropout's masks must go on where they were. Save torch.get_rng_state()."),
    Mistake({"    while step": "    restored = step // each_epoch\n    while step",
             "manual_seed(job.seed + epoch)": "manual_seed(job.seed + epoch - restored)"},
            "The epoch's seed was restored wrong: after a restart, the first epoch's order comes "
            "again. The number of the epoch follows from the steps that were taken."),
    *(Mistake({"    while step": "    begun = step\n    while step",
               "epoch, place = divmod(step, each_epoch)": place}, "The sampler begins the epoch "
              "again: samples that were read before the kill are read twice, and others never. Go "
              "on with the batch that comes next.") for place in (
        "epoch = step // each_epoch\n        place = step % each_epoch if epoch > begun // "
        "each_epoch else step - begun",
        "epoch, place = divmod(step - begun, each_epoch)\n        epoch += begun // each_epoch")),
    Mistake({RESTORED: '        for name, part in [*parts.items()][:2]:\n'}, "The scheduler was not "
            "restored: after a restart the learning rate falls at other steps."),
    Mistake({RESTORED: '        for name, part in [*parts.items()][::2]:\n'}, "The optimizer's "
            "state was not restored: the momentum begins with zero, and the rate with the first."),
    Mistake({RESTORED: '        for name, part in [*parts.items()][1:]:\n'}, "The weights were not "
            "restored: the model is as new."),
    Mistake({RESTORED: '        for name, part in [*parts.items()][:1]:\n'}, "Only the weights "
            "were restored: the optimizer's state and the scheduler's are as new."),
    Mistake({'        step = saved["step"]\n': ""}, "The number of steps was not restored, or "
            "only that of epochs: steps that were taken come again, on a model that has been "
            "trained."),
    Mistake({"    while step < job.steps:": "    for step in range(step, step + job.steps):"},
            "After a restart job.steps steps are taken once more: it is their number in all."),
    Mistake({"        job.step(order": "        before = torch.get_rng_state()\n        "
             "job.step(order", '"random": torch.get_rng_state()': '"random": before'},
            "The random numbers are saved as they were before the step, which then drew its mask: "
            "take their state when the step is done."),
    Mistake({"random = torch.Generator().manual_seed(job.seed + epoch)": "torch.manual_seed("
             "job.seed + epoch)", ", generator=random": ""}, "torch.manual_seed seeds the dropout "
            "anew, in each step: the order has a generator of its own, torch.Generator()."),
    Mistake({'"step": step}': '"step": step - 1}'}, "Off by one: the step that was just taken "
            "is taken again after a restart. Save the number of steps that have been taken."),
    Mistake({'"step": step}': '"step": step + 1}'}, "Off by one: after a restart a step is left "
            "out. Save the number of steps that have been taken."),
    Mistake({"        if step % job.every == 0:\n": "        if step == job.steps:\n"}, "More "
            "steps are taken again than those since the last save that was due: save after each "
            "job.every steps, and begin at the newest that is on the disk."),
    Mistake({"        if step % job.every == 0:\n": "        if True:\n"}, "It saves in between, which "
            "costs time: save only when the number of steps taken is a multiple of job.every."),
    Mistake({ORDER: "torch.arange(job.samples)[place * job.batch:(place + 1) * job.batch]"},
            "The samples come in the order in which they lie: take each epoch's own order."),
    Mistake({"job.seed + epoch": "job.seed"}, "Every epoch has the same order: its seed is "
            "job.seed + e."),
    Mistake({"-(-job.samples // job.batch)": "job.samples // job.batch"}, "The last samples of an "
            "epoch are left out: its last batch may be smaller, but it is one."),
]
