#compdef flatout
# Completion of flatout in zsh. To use it in every shell, with a folder of $fpath:
#   flatout completions zsh > ~/.zfunc/_flatout
_flatout() {
    local -a lines keys others keyed other
    local line
    lines=("${(@f)$("${words[1]}" complete -- "${(@)words[1,CURRENT]}" 2> /dev/null)}")
    for line in $lines; do
        # Words that end in = are incomplete and get no space.
        if [[ ${line%%$'\t'*} == *= ]]; then
            keys+=("${line%%$'\t'*}")
            keyed+=("${line/$'\t'/  }")
        elif [[ -n $line ]]; then
            others+=("${line%%$'\t'*}")
            other+=("${line/$'\t'/  }")
        fi
    done
    if (( ${#keys} + ${#others} == 0 )); then
        _files
        return
    fi
    (( ${#others} )) && compadd -l -d other -a others
    (( ${#keys} )) && compadd -S '' -l -d keyed -a keys
}
if [ "$funcstack[1]" = "_flatout" ]; then
    _flatout "$@"
else
    compdef _flatout flatout
fi
