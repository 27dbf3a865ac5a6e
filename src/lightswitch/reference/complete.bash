# Completes train.py and the job scripts in bash; `make completion` wrote this.
_lightswitch() {
  local line=${COMP_LINE:0:COMP_POINT} script folder=. python=python3 word
  for script in $line; do
    [[ $script == *train.py ]] && folder=$(dirname "$script")
  done
  [[ -x $folder/.venv/bin/python ]] && python=$folder/.venv/bin/python
  mapfile -t COMPREPLY < <("$python" -m lightswitch.reference.completion "$line" 2> /dev/null)
  word=${line##* }
  [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
  [[ ${COMPREPLY[*]} == *[=.] ]] && compopt -o nospace 2> /dev/null
  return 0
}
for _lightswitch_command in python python3 ./train.py torchrun srun sbatch; do
  complete -p "$_lightswitch_command" > /dev/null 2>&1 ||
    complete -o default -o bashdefault -F _lightswitch "$_lightswitch_command"
done
unset _lightswitch_command
