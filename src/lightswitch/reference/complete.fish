# Completes train.py and the job scripts in fish; `make completion` wrote this.
function __lightswitch
    set -l folder .
    for word in (commandline -cp | string split ' ')
        string match -q '*train.py' -- $word; and set folder (dirname $word)
    end
    set -l python python3
    test -x $folder/.venv/bin/python; and set python $folder/.venv/bin/python
    $python -m lightswitch.reference.completion (commandline -cp | string collect) 2>/dev/null
end
for name in python python3 train.py torchrun srun sbatch
    complete -c $name -a '(__lightswitch)'
end
