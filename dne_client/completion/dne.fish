# Completion of dne, dne-train, dne-store and dne-serve for fish 3.1 and newer.
# Keep it:  dne completion fish > ~/.config/fish/completions/dne.fish
# The other three commands look for files of their own names, so link them or load this file in
# ~/.config/fish/config.fish:  dne completion fish | source

# Every line is PATH|WORD|KIND|MEANING. KIND is command, switch, value, file, folder or =CHOICES.
set -g __dne_words '@WORDS@'

function __dne_kind --argument-names place word
    for row in (string split \n -- $__dne_words)
        set -l cells (string split '|' -- $row)
        if test "$cells[1]" = "$place" -a "$cells[2]" = "$word"
            echo -- $cells[3]
            return
        end
    end
end

function __dne_offer --argument-names place begins of_kind
    for row in (string split \n -- $__dne_words)
        set -l cells (string split '|' -- $row)
        test "$cells[1]" = "$place"; or continue
        string match -q -- "$begins*" $cells[2]; or continue
        test -z "$of_kind" -o "$cells[3]" = "$of_kind"; or continue
        printf '%s\t%s\n' $cells[2] $cells[4]
    end
end

function __dne_values --argument-names kind current before
    switch $kind
        case file
            __fish_complete_path $current | string replace -r '^' -- $before
        case folder
            __fish_complete_directories $current '' | string replace -r '^' -- $before
        case '=*'
            for choice in (string split ' ' -- (string sub -s 2 -- $kind))
                echo -- $before$choice
            end
    end
end

function __dne_complete
    set -l given (commandline -opc)
    set -l current (commandline -ct)
    set -l place (string replace -rf '^(?:.*/)?dne-' '' -- $given[1]; or echo '')
    set -l awaited ''
    for word in $given[2..-1]
        if test -n "$awaited"
            set awaited ''
            continue
        end
        set -l kind (__dne_kind "$place" "$word")
        switch "$kind"
            case command
                set place (string trim -- "$place $word")
            case switch ''
            case '*'
                set awaited $kind
        end
    end
    if test -n "$awaited"
        __dne_values "$awaited" "$current" ''
    else if string match -q -- '--*=*' $current
        set -l parts (string split -m 1 = -- $current)
        __dne_values (__dne_kind "$place" $parts[1])'' "$parts[2]" "$parts[1]="
    else if string match -q -- '-*' $current
        __dne_offer "$place" - ''
    else
        set -l commands (__dne_offer "$place" '' command)
        if test (count $commands) -gt 0
            printf '%s\n' $commands
        else
            __dne_values (__dne_kind "$place" '*')'' "$current" ''
        end
    end
end

for command in dne dne-train dne-store dne-serve
    complete -c $command -f -a '(__dne_complete)'
end
