# Completes train.py and the job scripts in zsh; `make completion` wrote this.
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u }
_lightswitch() {
  local script folder=. python=python3
  local -a found
  for script in ${=LBUFFER}; do
    [[ $script == *train.py ]] && folder=${script:h}
  done
  [[ -x $folder/.venv/bin/python ]] && python=$folder/.venv/bin/python
  found=(${(f)"$($python -m lightswitch.reference.completion "$LBUFFER" 2> /dev/null)"})
  if (( $#found )); then
    compadd -Q -S '' -- ${(M)found:#*[=.]}
    compadd -Q -- ${found:#*[=.]}
  else
    _default
  fi
}
compdef _lightswitch python python3 train.py torchrun srun sbatch
