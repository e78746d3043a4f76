"""What `--help` says of each command; here, so that it can be said before anything is imported."""

from __future__ import annotations

SUMMARY = """Merge fine-tuned models on your laptop: fast, exact, the same every time.

[bold]To merge[/bold]

  BASE MODEL...         the base and its models, files or folders; or, alone,
                        a recipe, or the output of a merge, to repeat it
  --output, -o PATH     a file if it ends in .safetensors, else a folder;
                        folders on the way to it are created
  --base, -b PATH       the base, and
  --models, -m PATH...  its models, if not given by position
  --method NAME         such as dare+ties, slerp or sum [dim](dare+linear)[/dim]
  --drop-rate NUMBER    share of each change that DARE drops [dim](0.9)[/dim]
  --weight NUMBER...    how much each model counts
  --seed NUMBER         of the random masks [dim](42)[/dim]
  --overwrite           replace an existing output
  --quiet, -q           show errors only"""

USAGE = """Usage: dare BASE MODEL... --output PATH [FLAGS]
       dare RECIPE [FLAGS]
       dare COMMAND --help"""

EXAMPLES = r"""[bold]Examples[/bold]

  dare analyze base math code                what is wrong with them?
  dare advise base math code > recipe.toml   a recipe that suits them
  dare recipe.toml                           merge; interrupted, it resumes
  dare base math code -o merged --method dare+ties --drop-rate 0.8
  dare verify merged                         is it still what was written?

[bold]Exit status[/bold]  0 done · 1 refused or failed · 2 wrong usage · 130 interrupted

`dare merge --help` lists every flag; `dare --version` and
`dare --install-completion` (completion in your shell) do what they say."""

GROUPS = {
    "Merge": ("merge", "plan", "init", "finish", "verify"),
    "Know before": ("analyze", "advise", "report"),
    "Find the best": ("search", "sweep"),
    "Store and convert": ("compress", "apply", "lora", "convert"),
    "Learn": ("methods", "demo", "playground"),
}
"""Commands by what they are for."""

COMMANDS = {
    "merge": r"""Merge models (the default: the word may be left out).

The output is base + scale · combine(deltas), where a delta is a model minus
the base. The method says how deltas are thinned out and combined: see
`dare methods`. Killed or interrupted, the same command resumes.

Two paths or more are the base and its models; one is a recipe, or the output
of a merge, to repeat it. A method that interpolates (slerp, nuslerp, karcher)
goes from one model to another: two paths are these two, and of three the first
is the base. Folders on the way to the output are created.

[bold]Examples[/bold]

  dare base.safetensors math.safetensors code.safetensors -o merged.safetensors
  dare --base base.safetensors --models math.safetensors code.safetensors \
       --output merged.safetensors
  dare math.safetensors code.safetensors -o half.safetensors --method slerp --t 0.5
  dare --config recipe.toml --drop-rate 0.95 --quiet
  dare base math code -o merged --method dare+ties --weight 0.7 0.3 \
       --drop-rate 0.9 0.5 --tensors '*.mlp.*: drop_rate=0.8' --dtype BF16
  dare merged.safetensors --output again.safetensors
  dare recipe.toml --slice 3/16        the third of sixteen parts""",
    "finish": """Publish an output that slices have made.

The last slice that is done publishes the output by itself. This does it where
that one could not: it takes the recipe and the flags of `dare merge`, checks
that every piece is there, and gives the output its name. The exit status is 1
if something is missing; the message says which slices have it to do.

[bold]Examples[/bold]

  dare finish recipe.toml""",
    "plan": """Say what a merge would do and cost.

Reads headers, no weights. Takes the flags of `dare merge`. How long the merge
will take is reckoned from its bytes and from earlier merges by the method.

[bold]Examples[/bold]

  dare plan recipe.toml
  dare plan base.safetensors math.safetensors --json""",
    "verify": """Check that an output is what was written.

Hashes the weights and compares them with the manifest, bit for bit. The exit
status is 0 if all outputs are intact, and 1 if one is not. The SHA-256 that it
prints is of the bytes of all tensors in order of name.

[bold]Examples[/bold]

  dare verify merged.safetensors
  dare verify merged/ --json""",
    "analyze": """Know before you merge: what the weights show.

Says on one screen what is wrong with the weights, if anything is: models that
come from elsewhere, copies, broken values, shapes that do not fit; how large
each change is, which models are alike, and what to type next. It cannot say
what a merge will be able to do: compare candidates on your data for that. The
exit status is 1 if the models cannot be merged.

[bold]Examples[/bold]

  dare analyze base.safetensors math.safetensors code.safetensors
  dare analyze base math code-lora --output analysis.json --html report.html
  dare analyze recipe.toml --json""",
    "advise": """Print a recipe that suits the models, with reasons.

The method follows from what `dare analyze` sees and from how such models fared
in our experiments; comments say why, and how often it was better or worse than
the plain average. The last lines are a search that compares the candidates on
your data. Prints nothing, and exits with 1, if no model is fit to be merged.
With --study: what a search has shown instead.

[bold]Examples[/bold]

  dare advise base.safetensors math.safetensors code.safetensors > recipe.toml
  dare advise --study study.db > recipe.toml
  dare advise analysis.json --json""",
    "report": """Make a page of an analysis, with figures.

One HTML file that needs no network: the verdict, the findings, distributions,
where each model changed, how models relate to each other, what dropping costs;
with --merged what a finished merge has kept. Needs the extra `report`.

[bold]Examples[/bold]

  dare report base.safetensors math.safetensors code.safetensors
  dare report analysis.json --output page.html
  dare report --merged merged.safetensors""",
    "search": r"""Find the best merge, and know whether it is one.

Makes candidates in memory and has each scored on data that you hold out. The
baselines come first: the base, each model, the plain average, task arithmetic
and the advice. Without --over only these are scored; take the simplest that no
other beats. A study is a file: stopped or killed, the same command resumes.

[bold]Examples[/bold]

  dare search recipe.toml --eval score.py:score
  dare search recipe.toml --over include=true,false --eval score.py:score
  dare search recipe.toml --over method=dare+linear,dare+ties,sum \
       drop_rate=0.3:0.95 scale=0.5:2 --trials 40 --eval score.py:score
  dare search recipe.toml --over weight.math=0:1 weight.code=0:1 \
       --sampler cmaes --eval 'python score.py {model}' \
       --guard english:max:1.25 --time-limit 600
  dare search recipe.toml --over drop_rate=0.5:0.95:layers=3 --race \
       --eval score.py:score --holdout score.py:test --html study.html
  dare search show recipe.study.db --html study.html
  dare search best recipe.study.db --write best.toml""",
    "sweep": r"""Try every combination of some settings.

The same as `dare search --sampler grid`.

[bold]Examples[/bold]

  dare sweep recipe.toml --over drop_rate=0.80,0.85,0.90,0.95 --seeds 5 \
       --eval 'python score.py {model}' --study study.db --json""",
    "methods": """List the methods, or explain one.

[bold]Examples[/bold]

  dare methods ties""",
    "init": r"""Write a commented recipe for the files given.

The files' headers are read, and they must fit together. Takes the flags of
`dare merge`.

[bold]Examples[/bold]

  dare init base.safetensors math.safetensors code.safetensors \
       --output merged.safetensors --method dare+ties
  dare init --from-analysis analysis.json -o merged.safetensors
  dare init base math code -o merged --to -""",
    "lora": r"""Merge LoRA adapters into one, or extract one from a model.

[bold]Examples[/bold]

  dare lora merge math-lora code-lora --output both-lora --rank 16
  dare lora extract --base base --model math --output math-lora --rank 32

Adapters are models too: `dare base math-lora code -o merged`
merges them into the base.""",
    "compress": """Store a fine-tune in an eighth of its space, or less.

A delta file holds what a model changes of its base, rounded to two bits for
each parameter unless you say otherwise. Dropping makes it smaller still, by
DARE's mask, which costs no indices; it costs more than rounding does.
It is a model like any other: merge it, analyze it, or make the model of it.

[bold]Examples[/bold]

  dare compress base math -o math.delta.safetensors --drop-rate 0.9 --bits 4
  dare compress base math -o math.delta.safetensors --lossless
  dare base math.delta.safetensors code -o merged""",
    "apply": """Make a model of a delta file and its base.

A lossless file gives the model's files again, bit for bit. Any other gives what
merging that one model by dare+sum would, with its rate and seed.

[bold]Examples[/bold]

  dare apply base math.delta.safetensors -o math""",
    "convert": """Turn a mergekit configuration into a recipe.

Prints it as TOML, with a comment on everything that will be different. What
cannot be converted is refused, with its line; where the models are at hand, so
is what could not be merged. `dare merge` reads such a file too.

[bold]Examples[/bold]

  dare convert mergekit.yaml > recipe.toml
  dare merge mergekit.yaml --output merged""",
    "demo": """Merge three small language models, and test them.

The models come with dare: a base that has read English, and three fine-tunes
of it. Shows what each and the merge can do, with and without DARE. Takes about
a minute.

[bold]Examples[/bold]

  dare demo --output demo --json""",
    "playground": """Try merges in the browser: a page that explains and computes.

Serves the page to this machine alone and opens it. Move a slider, and the
demonstration's models are merged and scored again; or merge your models from
the folders that you name. The address has a token: whoever has it may do what
the page does. Ctrl-C ends it. Needs the extra `web`.

[bold]Examples[/bold]

  dare playground
  dare playground models outputs --port 0 --no-browser
  dare playground --build site/playground     static files, for any web server""",
}
"""Each command's help; the first line is what the list of commands shows."""

SUBCOMMANDS = {
    "search show": """Show a study: in the terminal, as a page, or as JSON.

[bold]Examples[/bold]

  dare search show study.db --watch
  dare search show study.db --html study.html --failed""",
    "search best": """Write the recipe of the best setting, with what speaks for it.

[bold]Examples[/bold]

  dare search best study.db --write best.toml
  dare search best study.db --simplest""",
}
"""The help of commands that stand below another."""
